"""
Arrow's types and values as PostgreSQL's. No I/O.

Structs, maps, and lists of more than plain values are JSON. Values for which JSON has no form are text: dates and times
in ISO 8601, bytes in base64, NaN, infinities, and decimals, so that none is rounded.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from backend_client.sinks.conversions import in_utc
from storage.errors import UnavailableError

_JSON = ("json", "jsonb")
_WHOLE = ("int2", "int4", "int8", "numeric")
_OF_TEXT = ("S", "U", "E", "I")
"""Categories of types that are written as text: strings, own types (uuid, json, ...), enums, network addresses."""
_NOT_OF_TEXT = ("bytea", "name", "char")
"""Binary, and those of PostgreSQL's own tables, which cut text off in silence."""
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 6}
"""By unit of time: how many digits seconds have after the point, at most."""


@dataclass(frozen=True, slots=True)
class ColumnType:
    """
    A type of PostgreSQL; of a domain its base type.

    Args:
        name: As in ``pg_type``, such as "int8".
        category: Its category there, such as "N"; "A" is an array.
        element: The type of an array's elements.
        scale: How many digits a number, or seconds, have after the point, if the type says it: others would be rounded.
    """

    name: str
    category: str
    element: ColumnType | None = None
    scale: int | None = None

    def __str__(self) -> str:
        if self.element is not None:
            return f"{self.element}[]"
        return self.name if self.scale is None else f"{self.name} with {self.scale} digits after the point"


def fits(given: pa.DataType, column: ColumnType) -> bool:
    """
    Return whether values of an Arrow type can be written to a column without a change of their meaning.

    A value may still be out of the column's range.
    """
    types = pa.types
    if column.scale is not None and column.scale < _scale(given):
        return False
    if is_json(given):
        return column.name in _JSON
    if types.is_list(given) or types.is_large_list(given):
        return column.element is not None and fits(given.value_type, column.element)
    if types.is_string(given) or types.is_large_string(given):
        return column.category in _OF_TEXT and column.name not in _NOT_OF_TEXT
    if types.is_timestamp(given):
        # PostgreSQL would drop the zone of one, and give the other that of the session.
        return column.name == ("timestamp" if given.tz is None else "timestamptz")
    for is_of, names in (
        (types.is_null, (column.name,)),
        (types.is_boolean, ("bool",)),
        (types.is_integer, _WHOLE),
        (types.is_decimal, ("numeric",)),
        (types.is_floating, ("float4", "float8", "numeric")),
        (types.is_binary, ("bytea",)),
        (types.is_large_binary, ("bytea",)),
        (types.is_date, ("date",)),
        (types.is_time, ("time",)),
        (types.is_duration, ("interval",)),
    ):
        if is_of(given):
            return column.name in names
    return False


def _scale(given: pa.DataType) -> int:
    """Return how many digits after the point a column needs for values of an Arrow type; floats may be rounded."""
    if pa.types.is_decimal(given):
        return int(given.scale)
    if pa.types.is_temporal(given) and not pa.types.is_date(given):
        return _DIGITS[given.unit]
    return 0


def wanted_type(given: pa.DataType) -> str:
    """Return a column type that takes values of an Arrow type, for messages."""
    if is_json(given):
        return "jsonb"
    if pa.types.is_list(given) or pa.types.is_large_list(given):
        return f"{wanted_type(given.value_type)}[]"
    names = ("int8", "float8", "numeric", "bool", "text", "bytea", "date", "timestamp", "timestamptz", "interval")
    return next((name for name in names if fits(given, ColumnType(name, "S" if name == "text" else ""))), "other")


def is_json(given: pa.DataType) -> bool:
    """Return whether values of an Arrow type are written as JSON."""
    types = pa.types
    if types.is_list(given) or types.is_large_list(given):
        return is_json(given.value_type) or types.is_list(given.value_type) or types.is_large_list(given.value_type)
    return bool(types.is_struct(given) or types.is_map(given))


def rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """
    Yield a batch's rows as psycopg takes them.

    Raises:
        UnavailableError: A value has no form in PostgreSQL; names the column.
    """
    return zip(*(_values(batch, number) for number in range(batch.num_columns)), strict=True)


def noting_nulls(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str], found: set[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the batches; add those of the columns to `found` in which a value is null. Batches may lack some."""
    for batch in batches:
        found.update(name for name in columns if name in batch.schema.names and batch.column(name).null_count)
        yield batch


def has_nul(value: object) -> bool:
    """Return whether a value holds a NUL character, which no text in PostgreSQL can."""
    return any(map(has_nul, value)) if isinstance(value, list) else isinstance(value, str) and "\0" in value


def _values(batch: pa.RecordBatch, number: int) -> list[Any]:
    column = batch.column(number)
    try:
        values = _read(column)
        if is_json(column.type):
            values = [None if value is None else json.dumps(_plain(value, column.type)) for value in values]
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        # Such as a date after 9999, or text that is not UTF-8.
        name = batch.schema.names[number]
        raise UnavailableError(
            f"PostgreSQL cannot hold a value of column {name!r}: {error}; change it in the query", column=name
        ) from error
    return values


def _read(column: pa.Array) -> list[Any]:
    """Return a column's values. Python does not know all of Spark's zones, such as GMT+8: such times are in UTC."""
    if is_json(column.type):  # with the offsets of their zone, where it is known
        with suppress(KeyError):
            known: list[Any] = column.to_pylist()
            return known
    in_known_zone: list[Any] = column.cast(in_utc(column.type)).to_pylist()
    return in_known_zone


def _plain(value: Any, given: pa.DataType) -> Any:
    """Return a value as `json` takes it."""
    if value is None:
        return None
    if pa.types.is_struct(given):
        return {field.name: _plain(value[field.name], field.type) for field in given}
    if pa.types.is_map(given):
        return {_name(key): _plain(item, given.item_type) for key, item in value}
    if pa.types.is_list(given) or pa.types.is_large_list(given):
        return [_plain(item, given.value_type) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta) else value


def _name(key: Any) -> str:
    """Return a map's key as the name of a JSON field."""
    if isinstance(key, bool):
        return str(key).lower()
    if isinstance(key, bytes):
        return base64.b64encode(key).decode("ascii")
    return key.isoformat() if isinstance(key, datetime | date | time) else str(key)
