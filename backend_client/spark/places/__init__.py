"""Where partitions run: which hosts there are, which of them runs what, and frames that lead tasks there."""
