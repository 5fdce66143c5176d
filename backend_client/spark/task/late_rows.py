"""
Rows that come too late: which they are is said in SQL, and tasks drop and count them.

They travel with the rows of their partition, under a negative order, and so lie before all others. Counted in the
tasks, their number belongs to the very attempt that counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc


class LateRowFilter:
    """The batches without their late rows, which are counted."""

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
