"""Checkpoints from their begin to their manifest, savepoints, and rewinds to either."""
