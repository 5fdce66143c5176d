"""
Converts between Arrow batches and the rows of a user's function.

Rows are sorted by key group and key, so a key's rows are adjacent; a key may span several batches and still gets one
call with one lazy iterator. Values are the Python values of Spark's own Row API.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.types import StructType

from backend_client.key_runs import key_changes, same_key
from backend_client.spark.private.frames import arrow_type
from backend_client.whole_numbers import check_whole, holds_integers
from storage.errors import InvalidInputError

_FIRST_US, _LAST_US = (
    (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1)  # noqa: DTZ001 - NumPy has no zones
    for moment in (datetime.min, datetime.max)  # noqa: DTZ901
)


_FIXED = frozenset({bool, bytes, date, datetime, Decimal, float, int, str, timedelta, type(None)})
"""Types of values that never change."""


def row_factory(names: Sequence[str]) -> Callable[[Iterable[Any]], Row]:
    """
    Return a function that makes a Spark `Row` with these field names from a sequence of values.

    The rows' subclass knows each field's position: neither ``row.name`` nor ``row["name"]`` searches the list of names,
    and ``row.name`` calls no Python function, which would double the cost of an access.
    """
    positions = {name: position for position, name in reversed([*enumerate(names)])}
    fields = namedtuple("fields", ["_"] * len(names), rename=True)  # type: ignore[misc]  # noqa: PYI024
    at = tuple.__getitem__

    def item(row: Row, of: Any) -> Any:
        kind = type(of)
        if kind is int:
            return at(row, of)
        position = positions.get(of) if kind is str else None
        return Row.__getitem__(row, of) if position is None else at(row, position)

    members: dict[str, Any] = {"__fields__": list(names), "__getitem__": item}
    for name, position in positions.items():
        if name.isidentifier() and not hasattr(Row, name) and name not in members:
            members[name] = vars(fields)[fields._fields[position]]
    return partial(tuple.__new__, type("Row", (Row,), members))


class KeyRows(NamedTuple):
    """One key with its rows; the iterator is valid until the next key is requested."""

    key_group: int
    key: tuple[Any, ...]
    rows: Iterator[Any]


class _Batch(NamedTuple):
    starts: list[int]
    key_groups: list[int]
    keys: list[tuple[Any, ...]]
    rows: Any
    """A sliceable; a slice is what the user's function iterates over."""


class GroupedRows:
    """
    Splits sorted Arrow batches by key.

    Columns of each batch: key group, then `key_count` key columns, then the columns of the rows.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], key_count: int, names: Sequence[str]) -> None:
        self._batches = (batch for batch in batches if batch.num_rows)
        self._key_count = key_count
        self._new_row = row_factory(names)
        self.rows_seen = 0
        self.keys_seen = 0

    def __iter__(self) -> Iterator[KeyRows]:
        batch, begin = self._next(), 0
        while batch is not None:
            starts, key_groups, keys, rows = batch
            last = len(starts) - 1
            self.keys_seen += len(starts) - begin
            for i in range(begin, last):
                yield KeyRows(key_groups[i], keys[i], iter(rows[starts[i] : starts[i + 1]]))
            tail = _Tail(self._next, keys[last], rows[starts[last] :])
            yield KeyRows(key_groups[last], keys[last], iter(tail))
            tail.drain()
            batch, begin = tail.following

    def _next(self) -> _Batch | None:
        batch = next(self._batches, None)
        if batch is None:
            return None
        first_row = 1 + self._key_count
        key_columns = batch.columns[1:first_row]
        starts = np.flatnonzero(np.concatenate(([True], key_changes(key_columns))))
        keys = list(zip(*(to_python(column.take(pa.array(starts))) for column in key_columns), strict=True))
        rows = self._rows(batch.columns[first_row:])
        self.rows_seen += batch.num_rows
        return _Batch(starts.tolist(), to_python(batch.column(0).take(pa.array(starts))), keys, rows)

    def _rows(self, columns: Sequence[pa.Array]) -> Any:
        return list(map(self._new_row, zip(*map(to_python, columns), strict=True)))


class _Tail:
    """The rows of a batch's last key, which may continue in later batches; `following` is valid once drained."""

    def __init__(self, next_batch: Callable[[], _Batch | None], key: tuple[Any, ...], rows: Any) -> None:
        self._rows = self._generate(next_batch, key, rows)
        self.following: tuple[_Batch | None, int] = (None, 0)

    def __iter__(self) -> Iterator[Any]:
        return self._rows

    def drain(self) -> None:
        for _ in self._rows:
            pass

    def _generate(self, next_batch: Callable[[], _Batch | None], key: tuple[Any, ...], rows: Any) -> Iterator[Any]:
        while True:
            yield from rows
            batch = next_batch()
            if batch is None or not same_key(batch.keys[0], key):
                self.following = (batch, 0)
                return
            if len(batch.starts) > 1:
                yield from batch.rows[: batch.starts[1]]
                self.following = (batch, 1)
                return
            rows = batch.rows


def to_python(column: pa.Array) -> list[Any]:
    """Return a column's values as Python objects; through NumPy, which is faster, where the values are the same."""
    kind = column.type
    if column.null_count == 0 and (pa.types.is_integer(kind) or pa.types.is_float64(kind)):
        return column.to_numpy().tolist()  # type: ignore[no-any-return]
    if pa.types.is_timestamp(kind) and kind.unit == "us" and _has_python_moments(column):
        moments = column.to_numpy(zero_copy_only=False).tolist()
        if kind.tz is None:
            return moments  # type: ignore[no-any-return]
        zone = pa.lib.string_to_tzinfo(kind.tz)
        return [moment if moment is None else zone.fromutc(moment.replace(tzinfo=zone)) for moment in moments]
    return column.to_pylist()  # type: ignore[no-any-return]


def _has_python_moments(column: pa.Array) -> bool:
    """Return whether all timestamps are in the years 1 to 9999; NumPy returns others as integers."""
    bounds = pc.min_max(column.view(pa.int64())).as_py()
    return bounds["min"] is not None and bounds["min"] >= _FIRST_US and bounds["max"] <= _LAST_US


class RowsToArrow:
    """
    Builds Arrow columns from the rows that a user's function yields, matching fields by name as Spark does.

    Args:
        schema: The operator's output schema.
    """

    def __init__(self, schema: StructType) -> None:
        self.names = schema.names
        arrow = arrow_type(schema)
        self.types = [arrow.field(position).type for position in range(arrow.num_fields)]
        self._may_change = any(pa.types.is_nested(kind) or pa.types.is_binary(kind) for kind in self.types)
        self._whole = [holds_integers(kind) for kind in self.types]

    def taken(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Yield each row as it is now: as on Spark, a processor may change a list or an array that it has yielded."""
        return map(_taken, rows) if self._may_change else rows

    def columns(self, rows: Sequence[Any]) -> list[pa.Array]:
        """
        Return one array per field, of rows that `taken` has yielded.

        Raises:
            InvalidInputError: A row is not a `Row` with named fields, or a value does not fit its field.
        """
        names = self.names
        values: list[Sequence[Any]]
        if all(getattr(row, "__fields__", None) == names for row in rows):
            values = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        else:
            named = [_as_dict(row) for row in rows]
            values = [[row.get(name) for row in named] for name in names]
        arrays = []
        for name, kind, whole, column in zip(names, self.types, self._whole, values, strict=True):
            try:
                arrays.append(_array(column, kind))
                if whole:
                    check_whole(column, kind)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise InvalidInputError(
                    f"values of output column {name!r} do not fit its type {kind}: {error}"
                ) from error
        return arrays


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array whose structs may be dictionaries, tuples and lists of pairs; Arrow alone takes one form."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError):
        if not pa.types.is_nested(kind):
            raise
        return pa.concat_arrays([pa.array([value], kind) for value in values])


def check_row(row: Any) -> None:
    """Raise `InvalidInputError` unless what a processor yielded is a row with named fields."""
    if not isinstance(row, Row) or not hasattr(row, "__fields__"):
        raise InvalidInputError(f"the processor yielded {row!r}; it must yield pyspark.sql.Row with named fields")


def _as_dict(row: Any) -> dict[str, Any]:
    check_row(row)
    return dict(zip(row.__fields__, row, strict=True))


def _taken(row: Any) -> Any:
    if not isinstance(row, Row) or not hasattr(row, "__fields__"):
        return row  # `columns` refuses it
    taken = Row(*map(_plain, row))
    taken.__fields__ = row.__fields__
    return taken


def _plain(value: Any) -> Any:
    """Copy what can change, and turn rows in it into dictionaries, the form in which Arrow takes structs."""
    if type(value) in _FIXED:
        return value
    if isinstance(value, Row) and hasattr(value, "__fields__"):
        return {name: _plain(item) for name, item in zip(value.__fields__, value, strict=True)}
    if isinstance(value, list):
        return [*value] if _FIXED.issuperset(map(type, value)) else [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, memoryview):
        return value.tobytes()
    return value if isinstance(value, tuple) and _FIXED.issuperset(map(type, value)) else deepcopy(value)
