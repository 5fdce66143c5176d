"""
The inner join of two streams over columns: each row waits for partners of the other side. See docs/joins.md.

Time is cut into buckets, twice as long as a row waits. The state of a key and bucket is the rows of both sides whose
time is in it. A row visits the buckets in which partners may be, which are its own and a neighbour, and is stored in
its own. So a visit looks up one entry, and a batch writes only the entries in which it stores rows.

1. A pair of a new row and a stored one is found in the bucket of the stored row.
2. A pair of two new rows is found in the bucket of the left row.
3. A bucket ends when no row that is on time meets one of its rows.

No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.join.row_lists import ListedRows, pack_lists, unpack_lists
from backend_client.columnar.processor import ColumnarProcessor, KeyBatch, KeyResults, OutputMode
from backend_client.columnar.values import Bools, Ints, StateColumns, micros, valid
from backend_client.columnar.windows import Assigned, Windows
from storage.errors import InvalidInputError

_BUCKET_US_MIN = 1_000_000


@dataclass(frozen=True, slots=True)
class Buckets(Windows):
    """Windows of the stored rows: a bucket's window ends when its last row has waited long enough."""

    @classmethod
    def of(cls, column: str, wait_us: int) -> Buckets:
        """Return buckets for rows that wait up to `wait_us` microseconds."""
        bucket_us = max(2 * wait_us, _BUCKET_US_MIN)
        return cls(column, bucket_us + wait_us, bucket_us, 0)

    @property
    def has_panes(self) -> bool:
        """A row's buckets depend on its time."""
        return False

    def assign(self, times: pa.Array, watermark_ms: int | None, counts: Ints | None = None) -> Assigned:
        """Assign rows to the buckets that they visit; late rows, and those without a time, to none."""
        at = micros(times)
        visiting = valid(times)
        late_rows = 0
        if watermark_ms is not None:
            is_late = visiting & (at <= watermark_ms * 1000)
            late_rows, visiting = int(np.count_nonzero(is_late)), visiting & ~is_late
        rows = np.flatnonzero(visiting)
        wait_us = self.size_us - self.slide_us
        first, last = ((at[rows] + reach) // self.slide_us for reach in (-wait_us, wait_us))
        found_rows, starts = [rows[:0]], [rows[:0]]
        for further in range(-(-2 * wait_us // self.slide_us) + 1):
            bucket = first + further
            reached = bucket <= last
            found_rows.append(rows[reached])
            starts.append(bucket[reached] * self.slide_us)
        return Assigned(np.concatenate(found_rows), np.concatenate(starts), late_rows)


class _Side(NamedTuple):
    """An input's rows by entry: new ones, which of them are stored here, and those that are stored already."""

    new: ListedRows
    own: Bools
    stored: ListedRows


class IntervalJoin(ColumnarProcessor):
    """
    Joins two inputs, unioned into rows with a struct for each, exactly one of them not null.

    Output: the keys, the newer row's event time, and both structs.

    Args:
        event_time: The timestamp column.
        waits_us: How long the rows of each input wait, in microseconds, by the name of its struct: left, right.
    """

    def __init__(self, event_time: str, waits_us: Mapping[str, int]) -> None:
        self._event_time = event_time
        self._names = tuple(waits_us)
        self._waits_us = tuple(waits_us.values())
        self._buckets = Buckets.of(event_time, max(self._waits_us))
        self.windows = self._buckets

    def check(self, rows: pa.Schema, output_mode: OutputMode) -> None:
        """Refuse other modes than append, and columns that columnar state cannot hold."""
        super().check(rows, output_mode)
        if output_mode != "append":
            raise InvalidInputError("a join emits rows that do not change: its output mode is Append")
        for name in self._names:
            self._codec(rows, name)

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        """
        Return a list of rows per input.

        Its name has all that its bytes depend on, so that a start with other columns or another wait is refused.
        """
        # The longer wait exactly: buckets and their ends follow from it.
        seconds = f"{Decimal(max(self._waits_us)).scaleb(-6).normalize():f}"
        columns = (", ".join(f"{part.name} {part.type}" for part in rows.field(name).type) for name in self._names)
        lists = (f"{name} ({text}) waiting {seconds} s" for name, text in zip(self._names, columns, strict=True))
        return pa.schema([pa.field(text, pa.binary()) for text in lists])

    def output_schema(self, keys: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """Return the columns of the output: those of the keys are without the two that buckets add."""
        return pa.schema([*list(keys)[:-2], rows.field(self._event_time), *map(rows.field, self._names)])

    def process(self, batch: KeyBatch) -> KeyResults:
        """Store new rows, and emit the pairs that they complete."""
        count = len(batch.starts)
        left, right = (self._side(batch, at) for at in (0, 1))
        pairs = [
            self._pairs(left.new, right.stored),
            self._pairs(left.stored, right.new),
            self._pairs(_chosen(left.new, left.own), right.new),
        ]
        gets = [np.bincount(side.new.lists[side.own], minlength=count) > 0 for side in (left, right)]
        lists = [
            pc.if_else(pa.array(new), pack_lists(_both(side, new), count), old)
            for side, new, old in zip((left, right), gets, batch.state.columns, strict=True)
        ]
        changed = gets[0] | gets[1]
        return KeyResults(
            state=pa.RecordBatch.from_arrays(lists, schema=batch.state.schema),
            output=self._output(batch, pairs),
            keep=changed | batch.has_state,
            changed=changed,
        )

    def _codec(self, rows: pa.Schema, name: str) -> StateColumns:
        return StateColumns(pa.schema(list(rows.field(name).type)))

    def _side(self, batch: KeyBatch, position: int) -> _Side:
        part = batch.rows.column(self._names[position])
        # As in SQL, null equals nothing.
        whole = np.logical_and.reduce([valid(column) for column in batch.keys.columns])
        entry = batch.key_of_row
        chosen = np.flatnonzero(valid(part) & whole[entry])
        rows = pa.RecordBatch.from_struct_array(part.take(pa.array(chosen)))
        times = micros(batch.rows.column(self._event_time))[chosen]
        values = self._codec(batch.rows.schema, self._names[position]).encode(rows)
        begins = micros(batch.keys.column(batch.keys.num_columns - 2))[entry[chosen]]
        own = (begins <= times) & (times < begins + self._buckets.slide_us)
        return _Side(ListedRows(entry[chosen], times, values), own, unpack_lists(batch.state.column(position)))

    def _pairs(self, left: ListedRows, right: ListedRows) -> tuple[ListedRows, ListedRows]:
        """Return the pairs of rows of the same entry that meet."""
        of_left, of_right = self._meeting(left, right)
        return _taken(left, of_left), _taken(right, of_right)

    def _meeting(self, left: ListedRows, right: ListedRows) -> tuple[Ints, Ints]:
        """Return the positions of the rows of each pair; a row meets those up to a wait before and after it."""
        order = np.lexsort((right.times, right.lists))
        moments = np.unique(right.times)
        width = len(moments) + 1
        places = right.lists[order] * width + np.searchsorted(moments, right.times[order])
        before, after = self._waits_us[1], self._waits_us[0]
        low = left.lists * width + np.searchsorted(moments, left.times - before)
        high = left.lists * width + np.searchsorted(moments, left.times + after, side="right")
        begins, ends = np.searchsorted(places, low), np.searchsorted(places, high)
        counts = ends - begins
        of_left = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(len(of_left)) - np.repeat(np.cumsum(counts) - counts, counts)
        return of_left, order[np.repeat(begins, counts) + number]

    def _output(self, batch: KeyBatch, pairs: list[tuple[ListedRows, ListedRows]]) -> pa.RecordBatch | None:
        if not any(len(left.lists) for left, _ in pairs):
            return None
        left, right = (_joined([pair[side] for pair in pairs]) for side in (0, 1))
        at, schema = pa.array(left.lists), batch.rows.schema
        kind = schema.field(self._event_time).type
        newest = pa.array(np.maximum(left.times, right.times)).view(pa.timestamp("us", kind.tz)).cast(kind)
        keys = [column.take(at) for column in batch.keys.columns[:-2]]
        parts = []
        for name, side in zip(self._names, (left, right), strict=True):
            columns, _ = self._codec(schema, name).decode(side.values)
            parts.append(pa.StructArray.from_arrays(columns.columns, fields=list(schema.field(name).type)))
        fields = self.output_schema(batch.keys.schema, schema)
        return pa.RecordBatch.from_arrays([*keys, newest, *parts], schema=fields)


def _both(side: _Side, entries: Bools) -> ListedRows:
    """Return the rows of these entries with the new ones."""
    rows = _joined([_chosen(side.stored, entries[side.stored.lists]), _chosen(side.new, side.own)])
    return _taken(rows, np.argsort(rows.lists, kind="stable"))


def _joined(parts: list[ListedRows]) -> ListedRows:
    lists, times, values = zip(*parts, strict=True)
    return ListedRows(np.concatenate(lists), np.concatenate(times), pa.concat_arrays(values))


def _chosen(rows: ListedRows, mask: Bools) -> ListedRows:
    return ListedRows(rows.lists[mask], rows.times[mask], rows.values.filter(pa.array(mask)))


def _taken(rows: ListedRows, at: Ints) -> ListedRows:
    return ListedRows(rows.lists[at], rows.times[at], rows.values.take(pa.array(at)))
