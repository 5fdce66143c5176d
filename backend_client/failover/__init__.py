"""What becomes of a partition's rows while its table is being restored: decisions, and the rows in the log."""
