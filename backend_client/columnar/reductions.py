"""
Reduces many small groups at once, for the ready-made aggregations.

Values are ordered as in Spark: NaN is greater than all other numbers, text is compared by its bytes; nulls are ignored.
No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import localcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.values import Ints, valid
from storage.errors import InvalidInputError

_EXACT_DIGITS = 80
_DOUBLE_DIGITS = 15
"""Whole numbers with at most this many digits are doubles, and so are powers of ten with this exponent."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of adjacent rows; each has at least one row."""

    starts: Ints
    rows: int

    @property
    def sizes(self) -> Ints:
        """The number of rows of each group."""
        return np.diff(self.starts, append=self.rows)

    @property
    def of_rows(self) -> Ints:
        """The index of each row's group."""
        return np.repeat(np.arange(len(self.starts)), self.sizes)


def count(values: pa.Array | None, groups: Groups) -> Ints:
    """Return each group's number of non-null values; its number of rows if `values` is None."""
    if values is None or values.null_count == 0:
        return groups.sizes
    return np.add.reduceat(valid(values).astype(np.int64), groups.starts)


def sum_type(kind: pa.DataType) -> pa.DataType:
    """
    Return the type of a sum, as in Spark.

    Raises:
        InvalidInputError: Values of this type cannot be summed.
    """
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal128(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    raise InvalidInputError(f"values of type {kind} cannot be summed; cast the column to a number")


def total(values: pa.Array, groups: Groups, kind: pa.DataType) -> pa.Array:
    """
    Return the sum of each group, null without values.

    Args:
        values: Numbers.
        groups: The groups of the values.
        kind: The type of the sums.

    Raises:
        InvalidInputError: A sum does not fit its type.
    """
    empty = count(values, groups) == 0
    if pa.types.is_floating(kind):
        with np.errstate(invalid="ignore"):  # of infinities
            # Spark adds to 0.0, so minus zeros alone have the sum 0.0.
            sums = np.add.reduceat(_numbers(values, 0).astype(np.float64), groups.starts) + 0.0
        return pa.array(sums, kind, mask=empty)
    if pa.types.is_integer(kind):
        numbers = _numbers(values, 0).astype(np.int64)
        if np.abs(np.add.reduceat(numbers.astype(np.float64), groups.starts)).max(initial=0.0) < 2.0**62:
            return pa.array(np.add.reduceat(numbers, groups.starts), kind, mask=empty)
    exact = np.array([0 if value is None else value for value in values.to_pylist()], object)
    with localcontext(prec=_EXACT_DIGITS):
        exact_sums = np.add.reduceat(exact, groups.starts).tolist()
    try:
        return pa.array([None if no else value for value, no in zip(exact_sums, empty, strict=True)], kind)
    except (pa.ArrowException, OverflowError) as error:
        raise InvalidInputError(f"a sum exceeds its type {kind}; cast the column to a wider type: {error}") from error


def as_doubles(values: pa.Array) -> pa.Array:
    """Return each number's nearest double, as Spark's cast does; Arrow's cast of a decimal may miss it by two."""
    kind = values.type
    if not pa.types.is_decimal128(kind):
        return values.cast(pa.float64(), safe=False)
    if kind.precision > _DOUBLE_DIGITS or kind.scale < 0:
        return values.cast(pa.string()).cast(pa.float64())
    # Both numbers are doubles, so their quotient is the nearest one; this takes a tenth of the time.
    words = np.frombuffer(values.buffers()[1], "<i8", count=2 * len(values), offset=16 * values.offset)
    return pa.array(words[::2] / float(10**kind.scale), mask=~valid(values))


def extreme(values: pa.Array, groups: Groups, *, greatest: bool) -> pa.Array:
    """Return the greatest or least value of each group, null without values."""
    kind = values.type
    if not _is_numeric(kind):
        return by_order([values], groups, greatest=greatest)[0]
    empty = pa.array(count(values, groups) == 0)
    if pa.types.is_floating(kind):
        raw, least, most = values, -np.inf, np.nan
    else:
        raw = values if pa.types.is_integer(kind) else values.view(pa.int64() if kind.bit_width == 64 else pa.int32())
        bounds = np.iinfo(raw.type.to_pandas_dtype())
        least, most = bounds.min, bounds.max
    if greatest:
        found = pa.array(np.maximum.reduceat(_numbers(raw, least), groups.starts))
    else:
        found = pa.array(np.fmin.reduceat(_numbers(raw, most), groups.starts))
    return pc.if_else(empty, pa.scalar(None, kind), found.view(kind))


def by_order(columns: Sequence[pa.Array], groups: Groups, *, greatest: bool) -> list[pa.Array]:
    """Return each group's first or last row by these columns; ignores rows with a null in the first."""
    order, group = _ordered(columns, groups, descending=greatest)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    found = np.full(len(groups.starts), -1, np.int64)
    found[group[first]] = order[first]
    rows = pa.array(found, mask=found < 0)
    return [column.take(rows) for column in columns]


def leading(values: pa.Array, groups: Groups, limit: int) -> list[pa.Array]:
    """Return each group's greatest values: an array of the first, one of the second, …; null if there are fewer."""
    order, group = _ordered([values], groups, descending=True)
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    rank = np.arange(len(group)) - np.repeat(begins, np.diff(begins, append=len(group)))
    slots = np.full((limit, len(groups.starts)), -1, np.int64)
    taken = rank < limit
    slots[rank[taken], group[taken]] = order[taken]
    return [values.take(pa.array(slot, mask=slot < 0)) for slot in slots]


def beside(old: pa.Array, new: pa.Array) -> pa.Array:
    """Return old and new values interleaved; `pairs` returns their groups."""
    both = pa.concat_arrays([old, new])
    return both.take(pa.array(np.arange(len(both)).reshape(2, -1).T.reshape(-1)))


def pairs(number: int) -> Groups:
    """Return the groups of `beside`."""
    return Groups(np.arange(0, 2 * number, 2), 2 * number)


def _ordered(columns: Sequence[pa.Array], groups: Groups, *, descending: bool) -> tuple[Ints, Ints]:
    """Return row numbers sorted by group and columns, without rows with a null first column, and their groups."""
    names = [f"c{position}" for position in range(2 * len(columns))]
    direction = "descending" if descending else "ascending"
    keys: list[pa.Array] = []
    for column in columns:
        # Arrow sorts NaN last in both directions.
        keys += [
            pc.is_nan(column) if pa.types.is_floating(column.type) else pa.repeat(pa.scalar(False), groups.rows),
            column,
        ]
    table = pa.table([pa.array(groups.of_rows), *keys], ["group", *names])
    order = pc.sort_indices(table, [("group", "ascending"), *((name, direction) for name in names)]).to_numpy()
    order = order[valid(columns[0])[order]].astype(np.int64)
    return order, groups.of_rows[order]


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or (pa.types.is_floating(kind) and kind.bit_width > 16)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
    )


def _numbers(values: pa.Array, fill: float) -> npt.NDArray[Any]:
    filled = values if values.null_count == 0 else pc.fill_null(values, pa.scalar(fill, values.type))
    numbers: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return numbers
