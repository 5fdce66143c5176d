"""A checkpoint from its begin to its manifest; savepoints, and the way back to either."""
