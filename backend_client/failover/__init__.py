"""The rows of a partition whose table is being restored: decisions about them, and their form in the log."""
