"""Verifies stored state, and rebuilds the registry from the segments alone."""
