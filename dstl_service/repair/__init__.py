"""Checks what is stored, and rebuilds the registry from the segments alone."""
