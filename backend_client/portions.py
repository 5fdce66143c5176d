"""
Bounds the memory of an operator's output on its way to Spark: the portions that are converted, and that are sent.

No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

OUTPUT_ROWS = 10_000
OUTPUT_BYTES = 64 << 20
"""Spark's own limit of an Arrow batch, by default."""
_FIRST = 50


class Portion:
    """
    How many rows or frames are converted together: few at first, then as many as their size allows.

    Args:
        most: The greatest number.
    """

    def __init__(self, most: int = OUTPUT_ROWS) -> None:
        self._most = most
        self.count = min(_FIRST, most)

    def measure(self, count: int, columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
        """Take the columns of `count` rows or frames as a measure for the next ones."""
        size_bytes = sum(column.nbytes for column in columns)
        fit = OUTPUT_BYTES * count // max(1, size_bytes)
        self.count = max(1, min(self._most, fit, 2 * self.count))


def pieces(columns: Sequence[pa.Array | pa.ChunkedArray]) -> Iterator[list[pa.Array]]:
    """Cut columns into parts for Spark; Arrow itself has cut a column with more than 2 GiB of text."""
    table = pa.table(list(columns), [str(position) for position in range(len(columns))])
    fit = OUTPUT_BYTES * table.num_rows // max(1, table.nbytes)
    for part in table.to_batches(max_chunksize=max(1, min(OUTPUT_ROWS, fit))):
        if part.num_rows:
            yield part.columns
