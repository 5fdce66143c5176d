"""Kills at every step of publishing: what a committed reader sees equals the output of an undisturbed run."""
