"""Rewrites the retained log, so that few objects hold the data still needed."""
