"""
Late rows: marked in SQL; dropped and counted by tasks.

They stay in their partition under a negative order number, so they sort before all other rows. Counting them in the
tasks ties the count to the accepted attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc


class LateRowFilter:
    """Iterates over batches without their late rows, and counts those."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = batches
        self.late_rows = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            if batch.num_rows and batch.column(0)[0].as_py() < 0:
                late = pc.sum(pc.less(batch.column(0), 0)).as_py()
                self.late_rows += late
                yield batch.slice(late)
            else:
                yield batch
