"""Kills at every step of publishing: a reader of committed data sees the output of an undisturbed run."""
