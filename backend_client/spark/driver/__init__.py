"""The driver's part of every batch of a query."""
