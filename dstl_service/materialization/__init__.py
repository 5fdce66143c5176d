"""Snapshots of tables: when one is taken, how it is uploaded, and when a checkpoint accepts it."""
