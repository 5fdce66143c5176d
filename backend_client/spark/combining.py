"""
Lets Spark combine the rows of a key before they reach Python, where an aggregation allows it.

A batch's rows are moved to their partitions and there aggregated by Spark's compiled code, to one row per key, with
windows one per key and *pane* (see `columnar.window_rows`). Python then gets the state of these rows instead of them.
Where keys have many rows, those of each source partition are aggregated before they are moved, too.
Sums of `long` come in two halves that cannot overflow: only the sum of a whole window must fit its type. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np
import pyarrow as pa

from backend_client.columnar.aggregate import Aggregate
from backend_client.columnar.aggregations import Aggregation, Count, Max, Mean, Min, Sum
from backend_client.columnar.chunks import Chunk
from backend_client.columnar.reductions import Groups
from backend_client.columnar.values import Ints
from backend_client.columnar.window_rows import Panes
from backend_client.columnar.windows import Windows
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.columns import quoted

PANE_COLUMN, ROWS_COLUMN = "__dstl_pane", "__dstl_rows"
_PART_COLUMN = "__dstl_part_"

ROWS_MIN = 10_000
"""The aggregation costs Spark a few ms of planning in each batch, which fewer rows do not save."""
ROWS_PER_GROUP_BEGIN, ROWS_PER_GROUP_END = 4, 2
"""Rows are combined once a batch has the first number of rows per group, until one has fewer than the second."""

ROWS_PER_GROUP_APART = 2
"""
Rows are also aggregated before they are moved if a source partition has this number of rows per group on average, were
there as many as the operator has: to count them, Spark would plan the rows, and may compute parts of that plan twice.
"""

_HALF_BITS = 32
_LOW = (1 << _HALF_BITS) - 1
_LONG_MAX = (1 << 63) - 1
_DIGITS_MAX = 28
"""Sums of decimals with more digits may exceed Spark's 38."""


@dataclass(frozen=True, slots=True)
class _Part:
    """
    Spark's part of an aggregation.

    Args:
        sql: SQL aggregates of rows.
        kinds: Their types.
        is_halved: Whether two make one state column.
        merge: The SQL function that aggregates results of these.
    """

    sql: tuple[str, ...]
    kinds: tuple[pa.DataType, ...]
    is_halved: bool = False
    merge: str = "sum"


@dataclass(frozen=True, slots=True)
class Combining:
    """
    How the rows of an operator are combined; built by `combining_of`.

    Args:
        windows: The operator's windows.
        state: The state's columns.
        parts: What Spark computes for each aggregation.
        time: The type of the windows' column.
    """

    windows: Windows | None
    state: pa.Schema
    parts: tuple[_Part, ...]
    time: pa.DataType | None

    @property
    def pane(self) -> str | None:
        """The SQL expression of the start of a row's pane, in µs; None without windows."""
        windows = self.windows
        if windows is None:
            return None
        at = f"unix_micros({quoted(windows.column)})"
        return f"{at} - pmod({at} - {windows.offset_us}L, {windows.slide_us}L)"

    @property
    def aggregates(self) -> list[str]:
        """The SQL aggregates: the number of rows, then the parts of the state."""
        parts = [text for part in self.parts for text in part.sql]
        return [
            f"count(*) as {ROWS_COLUMN}",
            *(f"{text} as {_PART_COLUMN}{at}" for at, text in enumerate(parts)),
        ]

    @property
    def merges(self) -> list[str]:
        """The SQL aggregates of results of the `aggregates`: they have the same names and types."""
        names = (f"{_PART_COLUMN}{at}" for at in count())
        parts = [(next(names), kind, part.merge) for part in self.parts for kind in part.kinds]
        return [
            f"sum({ROWS_COLUMN}) as {ROWS_COLUMN}",
            *(f"{_as_kind(f'{merge}({name})', kind)} as {name}" for name, kind, merge in parts),
        ]

    @property
    def rows(self) -> pa.Schema:
        """The columns after the keys of combined rows: the pane, if there are windows, and the `aggregates`."""
        pane = [] if self.windows is None else [pa.field(PANE_COLUMN, pa.int64())]
        kinds = [kind for part in self.parts for kind in part.kinds]
        fields = [pa.field(f"{_PART_COLUMN}{at}", kind) for at, kind in enumerate(kinds)]
        return pa.schema([*pane, pa.field(ROWS_COLUMN, pa.int64()), *fields])

    def panes(self, chunk: Chunk) -> Panes:
        """Return the combined rows as condensed ones; a sum that exceeds its type is spread over several of them."""
        columns = iter(chunk.rows.columns)
        starts = None if self.windows is None else next(columns)
        counts = next(columns).to_numpy()
        state, spread = list[pa.Array](), dict[int, dict[int, list[int]]]()
        for part in self.parts:
            parts = [next(columns) for _ in part.kinds]
            if part.is_halved:
                whole, too_large = _joined_halves(*parts)
                if too_large:
                    spread[len(state)] = too_large
                parts = [whole]
            state += parts
        rows = pa.RecordBatch.from_arrays(state, schema=self.state)
        times = None
        if starts is not None and self.time is not None:
            times = starts.view(pa.timestamp("us", self.time.tz)).cast(self.time)
        panes = Panes(rows, Groups(chunk.starts, chunk.rows.num_rows).of_rows, times, counts)
        return _spread(panes, spread) if spread else panes


def combining_of(plan: ColumnarPlan) -> Combining | None:
    """Return how Spark can combine an operator's rows; None if it cannot."""
    processor, windows = plan.processor, plan.processor.windows
    if type(processor) is not Aggregate or any(pa.types.is_nested(field.type) for field in plan.keys):
        return None
    if len({name.lower() for name in plan.rows.names}) < len(plan.rows.names):
        return None  # SQL would find two columns
    time = None if windows is None else plan.rows.field(windows.column).type
    if windows is not None and (time is None or time.tz is None or windows.size_us % windows.slide_us):
        return None
    parts = [_part(aggregation, plan.rows) for aggregation in processor.aggregations]
    known = tuple(part for part in parts if part is not None)
    if len(known) < len(parts):
        return None
    return Combining(windows, processor.state_schema(plan.rows), known, time)


def are_worth_combining(rows: int, groups: int, *, are_combined: bool) -> bool:
    """
    Return whether the next batch's rows should be combined.

    Args:
        rows: Number of rows of the last batch.
        groups: Number of rows that were left of them, or would have been.
        are_combined: Whether they were combined.
    """
    return rows >= ROWS_MIN and rows >= groups * (ROWS_PER_GROUP_END if are_combined else ROWS_PER_GROUP_BEGIN)


def _part(aggregation: Aggregation, rows: pa.Schema) -> _Part | None:
    """Return what Spark computes for an aggregation, with the same result; None if it cannot."""
    states = tuple(aggregation.state_types(rows))
    if type(aggregation) is Count and aggregation.column == "1":
        return _Part(("count(*)",), states)
    kind, column = rows.field(aggregation.column).type, quoted(aggregation.column)
    if type(aggregation) is Count:
        return _Part((f"count({column})",), states)
    if type(aggregation) is Sum:
        return _sum(kind, column, states)
    if type(aggregation) is Mean:
        return _Part((f"sum(cast({column} as double))", f"count({column})"), states)
    if type(aggregation) in (Min, Max) and _is_fixed(kind):
        name = type(aggregation).__name__.lower()
        return _Part((f"{name}({column})",), states, merge=name)
    return None


def _sum(kind: pa.DataType, column: str, states: tuple[pa.DataType, ...]) -> _Part | None:
    if pa.types.is_int64(kind):
        halves = (f"sum(shiftright({column}, {_HALF_BITS}))", f"sum({column} & {_LOW}L)")
        return _Part(halves, (pa.int64(), pa.int64()), is_halved=True)
    if pa.types.is_decimal(kind) and kind.precision > _DIGITS_MAX:
        return None
    if pa.types.is_floating(kind):
        return _Part((f"sum(cast({column} as double))",), states)
    return _Part((f"sum({column})",), states)


def _as_kind(sql: str, kind: pa.DataType) -> str:
    """Return a sum of sums in their own type, which it fits; a sum of decimals has one with more digits."""
    return f"cast({sql} as decimal({kind.precision}, {kind.scale}))" if pa.types.is_decimal(kind) else sql


def _is_fixed(kind: pa.DataType) -> bool:
    """Return whether Spark aggregates values of a type in place; it would sort all rows for others."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
    )


def _joined_halves(high: pa.Array, low: pa.Array) -> tuple[pa.Array, dict[int, list[int]]]:
    """Return sums from their halves, null for null; and the parts of each that does not fit, by row."""
    nulls = high.is_null().to_numpy(zero_copy_only=False)
    highs, lows = (half.fill_null(0).to_numpy() for half in (high, low))
    highs, lows = highs + (lows >> _HALF_BITS), lows & _LOW
    fits = (highs >= -(1 << 31)) & (highs < 1 << 31)
    sums = (np.where(fits, highs, 0) << _HALF_BITS) | np.where(fits, lows, 0)
    too_large = {int(row): _pieces((int(highs[row]) << _HALF_BITS) + int(lows[row])) for row in np.flatnonzero(~fits)}
    return pa.array(sums, pa.int64(), mask=nulls), too_large


def _pieces(total: int) -> list[int]:
    """Return numbers that fit and have this sum: not more than it has summands."""
    sign, (whole, rest) = 1 if total > 0 else -1, divmod(abs(total), _LONG_MAX)
    return [*[sign * _LONG_MAX] * whole, sign * rest]


def _spread(panes: Panes, spread: dict[int, dict[int, list[int]]]) -> Panes:
    """Return panes with more rows where a column has several pieces; the added rows are null in all other columns."""
    times = np.ones(panes.rows.num_rows, np.int64)
    for pieces in spread.values():
        for row, numbers in pieces.items():
            times[row] = max(times[row], len(numbers))
    row_of = np.repeat(np.arange(len(times)), times)
    is_added = np.diff(row_of, prepend=-1) == 0
    firsts = np.flatnonzero(~is_added)
    taken = pa.array(row_of, mask=is_added)
    columns = [
        _with_pieces(column.take(taken), firsts, spread.get(at, {})) for at, column in enumerate(panes.rows.columns)
    ]
    return Panes(
        rows=pa.RecordBatch.from_arrays(columns, schema=panes.rows.schema),
        key_of_row=panes.key_of_row[row_of],
        times=None if panes.times is None else panes.times.take(pa.array(row_of)),
        counts=np.where(is_added, 0, panes.counts[row_of]),
    )


def _with_pieces(column: pa.Array, firsts: Ints, pieces: dict[int, list[int]]) -> pa.Array:
    if not pieces:
        return column
    values: list[int | None] = column.to_pylist()
    for row, numbers in pieces.items():
        first = int(firsts[row])
        values[first : first + len(numbers)] = numbers
    return pa.array(values, column.type)
