"""Rewrites the retained log, so that few objects hold what is still needed."""
