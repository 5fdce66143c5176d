"""
Regroups a partition's sorted Arrow batches into chunks of complete keys. No I/O.

A chunk has about `ROWS` rows, or as many as its only key has; memory holds one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from backend_client.columnar.keys import KeyColumns
from backend_client.columnar.values import Ints
from backend_client.key_runs import key_changes

ROWS = 1 << 17
BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """
    Some keys with all their rows.

    Args:
        key_groups: The key group of each key.
        keys: The key columns, one row per key.
        encoded: The bytes of each key.
        rows: The rows of all keys.
        starts: Index of each key's first row.
        is_last: Whether the partition ends here.
    """

    key_groups: Ints
    keys: list[pa.Array]
    encoded: pa.Array
    rows: pa.RecordBatch
    starts: Ints
    is_last: bool


class KeyChunks:
    """
    Splits the batches of one partition.

    Args:
        batches: Sorted by key group and key. Columns: key group, key columns, columns of the rows.
        keys: The operator's keys.
        rows: The schema of the rows, as processors see them.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], keys: KeyColumns, rows: pa.Schema) -> None:
        self._batches = (batch for batch in batches if batch.num_rows)
        self._keys = keys
        self._rows = rows
        self.rows_seen = 0
        self.keys_seen = 0

    def __iter__(self) -> Iterator[Chunk]:
        held: list[pa.RecordBatch] = []
        rows = size = 0
        one_key = 0  # this many of the held batches are known to have one key, and are not checked again
        for batch in self._batches:
            held.append(batch)
            self.rows_seen += batch.num_rows
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows < ROWS and size < BYTES:
                continue
            if not self._has_end(held, one_key):
                one_key = len(held)
                continue
            joined = _joined(held)
            starts = self._starts(joined)
            yield self._chunk(joined, starts[:-1], int(starts[-1]), is_last=False)
            # These rows are not joined again before their key ends, so a row is copied at most twice.
            held, one_key = [joined.slice(int(starts[-1]))], 1
            rows, size = held[0].num_rows, held[0].nbytes
        if held:
            joined = _joined(held)
            yield self._chunk(joined, self._starts(joined), joined.num_rows, is_last=True)

    def _has_end(self, held: list[pa.RecordBatch], one_key: int) -> bool:
        """Return whether a key ends within these batches, of which the first `one_key` have one key."""
        before = [held[one_key - 1].slice(held[one_key - 1].num_rows - 1)] if one_key else []
        columns = range(1, 1 + len(self._keys.fields))
        return len(self._starts(_joined([part.select(columns) for part in (*before, *held[one_key:])]), 0)) > 1

    def _chunk(self, batch: pa.RecordBatch, starts: Ints, end: int, *, is_last: bool) -> Chunk:
        first_row = 1 + len(self._keys.fields)
        at = pa.array(starts)
        columns = [
            column.take(at).cast(field.type)
            for column, field in zip(batch.columns[1:first_row], self._keys.fields, strict=True)
        ]
        rows = [
            column.slice(0, end).cast(field.type)
            for column, field in zip(batch.columns[first_row:], self._rows, strict=True)
        ]
        self.keys_seen += len(starts)
        encoded = self._keys.encode(columns)
        return Chunk(
            key_groups=batch.column(0).to_numpy()[starts],
            keys=self._keys.in_normal_form(columns, encoded),
            encoded=encoded,
            rows=pa.RecordBatch.from_arrays(rows, schema=self._rows),
            starts=starts,
            is_last=is_last,
        )

    def _starts(self, batch: pa.RecordBatch, first: int = 1) -> Ints:
        """Return the first row of each key; the key columns begin at `first`."""
        changes = key_changes(batch.columns[first : first + len(self._keys.fields)])
        return np.flatnonzero(np.concatenate(([True], changes)))


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks()
    return pa.RecordBatch.from_arrays([column.chunk(0) for column in table.columns], schema=table.schema)
