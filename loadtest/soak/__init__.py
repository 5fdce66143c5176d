"""``make soak``: thousands of small batches, and whether anything grows meanwhile."""
