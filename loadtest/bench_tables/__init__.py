"""Flink's published tables again: checkpoints, sizes and recovery with the changelog on and off."""
