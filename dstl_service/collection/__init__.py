"""Retention and deletion: subsumed checkpoints, garbage, and deleted jobs."""
