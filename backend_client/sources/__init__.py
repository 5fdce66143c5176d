"""Commits the offsets of a query's checkpoints to the systems that it reads from, under a consumer group."""
