"""
Gives timestamps that were read from state their zone.

As on Spark, state hands them out in the worker's local time, without zone, while Arrow takes a timestamp without zone
as UTC. So an operator that yields what it has read from state names the zone first. No I/O.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType

from backend_client.spark.task.rows import row_factory
from backend_client.state.stored_forms import Convert, in_utc


def zoned(kind: DataType) -> Convert:
    """Return the function that gives the timestamps in a value read from state, at any depth, their zone."""
    return _conversion(kind) or (lambda value: value)


def _conversion(kind: DataType) -> Convert | None:
    """Return the conversion of non-null values; None if the type has no timestamps."""
    if isinstance(kind, TimestampType):
        return in_utc
    if isinstance(kind, StructType):
        return _of_fields(kind)
    if isinstance(kind, ArrayType):
        item = _conversion(kind.elementType)
        return None if item is None else lambda values: [_or_none(item, value) for value in values]
    if isinstance(kind, MapType):
        key, item = _conversion(kind.keyType), _conversion(kind.valueType)
        if key is None and item is None:
            return None
        return lambda pairs: {_or_none(key, name): _or_none(item, value) for name, value in pairs.items()}
    return None


def _of_fields(kind: StructType) -> Convert | None:
    parts = [_conversion(field.dataType) for field in kind.fields]
    if not any(parts):
        return None
    new_row = row_factory(kind.names)
    return lambda row: new_row(map(_or_none, parts, row))


def _or_none(convert: Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)
