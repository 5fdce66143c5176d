"""Snapshots of tables: when to take one, how to upload it, and when a checkpoint accepts it."""
