"""
Event-time windows: assignment of rows, and when a window is over.

A window is ``[start, start + size)``. A row with a null time belongs to no window, and rows of windows that are over
are dropped, as in Spark. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from backend_client.columnar.values import Ints, micros, valid
from backend_client.option_checks import check_column
from backend_client.option_checks import micros as micros_of
from storage.errors import InvalidInputError

START, END = "window_start", "window_end"
_WINDOWS_MAX = 100_000
"""The number of windows of one row."""


class Assigned(NamedTuple):
    """
    Pairs of a row and a window; a row of several overlapping windows occurs several times.

    `late_rows` is the number of rows whose windows are all over.
    """

    rows: Ints
    starts_us: Ints
    late_rows: int


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one size over a column; built by `tumbling` and `sliding`."""

    column: str
    size_us: int
    slide_us: int
    offset_us: int

    def check(self, rows: pa.Schema) -> None:
        """
        Check that these rows have the windows' column.

        Raises:
            InvalidInputError: The column is missing or not a timestamp.
        """
        if self.column not in rows.names or not pa.types.is_timestamp(rows.field(self.column).type):
            raise InvalidInputError(f"windows need a timestamp column; the input has none named {self.column!r}")

    def fields(self, rows: pa.Schema) -> list[pa.Field]:
        """Return the two columns that windows add to a key."""
        kind = rows.field(self.column).type
        return [pa.field(START, kind), pa.field(END, kind)]

    @property
    def has_panes(self) -> bool:
        """Whether windows overlap, and all rows between the starts of two windows are in the same ones."""
        return self.slide_us < self.size_us and self.size_us % self.slide_us == 0

    def newest_us(self, times: pa.Array) -> Ints:
        """Return the start of the newest window of each time; that of a null is of no use."""
        at = micros(times)
        return at - (at - self.offset_us) % self.slide_us

    def assign(self, times: pa.Array, watermark_ms: int | None, counts: Ints | None = None) -> Assigned:
        """
        Assign rows with these times to windows, without windows that are over.

        Args:
            times: The rows' times.
            watermark_ms: Windows are over that end at or before it.
            counts: How many rows each one stands for, for the number of late ones; None for one.
        """
        timed = np.flatnonzero(valid(times))
        at = micros(times)[timed]
        newest = self.newest_us(times)[timed]
        late_rows = 0
        if watermark_ms is not None:
            is_late = newest + self.size_us <= watermark_ms * 1000
            late_rows = int(np.count_nonzero(is_late) if counts is None else counts[timed[is_late]].sum())
        rows, starts = [], []
        for back in range(-(-self.size_us // self.slide_us)):
            start = newest - back * self.slide_us
            inside = start + self.size_us > at
            if watermark_ms is not None:
                inside &= start + self.size_us > watermark_ms * 1000
            rows.append(timed[inside])
            starts.append(start[inside])
        return Assigned(np.concatenate(rows), np.concatenate(starts), late_rows)

    def columns(self, starts_us: Ints, kind: pa.DataType) -> list[pa.Array]:
        """Return the starts and ends of windows as timestamps of this type."""
        unit = pa.timestamp("us", kind.tz)
        return [pa.array(starts_us + part, pa.int64()).view(unit).cast(kind) for part in (0, self.size_us)]

    def ends_ms(self, starts_us: Ints) -> Ints:
        """Return the lowest watermark, in ms, at which each window is over."""
        return -(-(starts_us + self.size_us) // 1000)


def tumbling(column: str, size: timedelta, offset: timedelta = timedelta(0)) -> Windows:
    """Return contiguous windows; `offset` shifts them against 1970-01-01 00:00 UTC."""
    return sliding(column, size, size, offset)


def sliding(column: str, size: timedelta, slide: timedelta, offset: timedelta = timedelta(0)) -> Windows:
    """
    Return windows that start every `slide`, and so overlap.

    Raises:
        InvalidInputError: A duration is no timedelta or not positive, the windows would have gaps, or a row would be in
            more than 100,000 of them.
    """
    check_column("a window", column)
    parts = {"size": size, "slide": slide, "offset": offset}
    size_us, slide_us, offset_us = (micros_of(f"the {part} of windows", given) for part, given in parts.items())
    if not 0 < slide_us <= size_us:
        raise InvalidInputError(f"windows need 0 < slide <= size; slide is {slide}, size is {size}")
    if size_us > _WINDOWS_MAX * slide_us:
        raise InvalidInputError(
            f"a row would be in {size_us // slide_us} windows, and may be in {_WINDOWS_MAX}: with size {size} the "
            f"slide {slide} is too short"
        )
    return Windows(column, size_us, slide_us, offset_us)
