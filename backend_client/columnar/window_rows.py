"""
The rows of a chunk by key and window.

A row of overlapping windows occurs in each of them. If windows start at multiples of their slide, all rows between two
such moments, a *pane*, are in the same windows. Where the processor can, it first condenses the rows of each key and
pane to one, which then occurs in each window instead of them. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.chunks import Chunk
from backend_client.columnar.reductions import Groups
from backend_client.columnar.values import Ints, valid
from backend_client.columnar.windows import Windows

Condense = Callable[[pa.RecordBatch, Groups], pa.RecordBatch | None]
"""Returns one row per group that stands for the group's rows; None if there is none."""


class Panes(NamedTuple):
    """
    Condensed rows, those of a key adjacent; a pane of a key may have several.

    Args:
        rows: The rows.
        key_of_row: Index of each one's key.
        times: Start of each one's pane; None without windows.
        counts: The number of rows that each one stands for.
    """

    rows: pa.RecordBatch
    key_of_row: Ints
    times: pa.Array | None
    counts: Ints


@dataclass(frozen=True, slots=True)
class WindowRows:
    """
    Rows by key and window.

    Args:
        rows: The rows of all keys and windows, condensed or as they are.
        starts: Index of the first row of each key and window.
        keys: Index of each one's key.
        begins_us: Start of each one's window.
        late_rows: Number of rows that are dropped as late.
        is_condensed: Whether the rows are condensed.
        panes: Number of keys and panes, or of keys and windows if rows are not condensed.
    """

    rows: pa.RecordBatch
    starts: Ints
    keys: Ints
    begins_us: Ints
    late_rows: int
    is_condensed: bool
    panes: int


def window_rows(
    chunk: Chunk, windows: Windows, watermark_ms: int | None, condense: Condense, panes: Panes | None = None
) -> WindowRows:
    """
    Assign a chunk's rows to windows; those of windows that are over are left out.

    With `panes`, these are the chunk's rows, condensed before.
    """
    if panes is None and windows.has_panes:
        panes = _panes(chunk, windows, condense)
    if panes is not None:
        rows, key_of_row, times, counts = panes
        assert times is not None
    else:
        rows, times, counts = chunk.rows, chunk.rows.column(windows.column), None
        key_of_row = Groups(chunk.starts, rows.num_rows).of_rows
    assigned = windows.assign(times, watermark_ms, counts)
    of_key = key_of_row[assigned.rows]
    order = np.lexsort((assigned.rows, assigned.starts_us, of_key))
    of_key, begins = of_key[order], assigned.starts_us[order]
    starts = _firsts(of_key, begins)
    taken = rows.take(pa.array(assigned.rows[order]))
    groups = len(starts) if panes is None else panes.rows.num_rows
    return WindowRows(taken, starts, of_key[starts], begins[starts], assigned.late_rows, panes is not None, groups)


def _panes(chunk: Chunk, windows: Windows, condense: Condense) -> Panes | None:
    """Return a row per key and pane, its key, its pane's start, and the number of rows that it stands for."""
    times = chunk.rows.column(windows.column)
    timed = np.flatnonzero(valid(times))
    if not len(timed):
        return None
    pane = windows.newest_us(times)[timed]
    of_key = Groups(chunk.starts, chunk.rows.num_rows).of_rows[timed]
    order = np.lexsort((pane, of_key))
    of_key, pane = of_key[order], pane[order]
    groups = Groups(_firsts(of_key, pane), len(order))
    rows = condense(chunk.rows.take(pa.array(timed[order])), groups)
    if rows is None:
        return None
    starts = pa.array(pane[groups.starts]).view(pa.timestamp("us", times.type.tz))
    return Panes(rows, of_key[groups.starts], pc.cast(starts, times.type, safe=False), groups.sizes)


def _firsts(keys: Ints, times: Ints) -> Ints:
    """Return the places of the first of each pair, of pairs in order."""
    return np.flatnonzero((np.diff(keys, prepend=-1) != 0) | (np.diff(times, prepend=0) != 0))
