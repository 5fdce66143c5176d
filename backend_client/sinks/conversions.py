"""Which Arrow types keep the values of another one. No I/O."""

from __future__ import annotations

import pyarrow as pa

_DIGITS_MAX = 38
"""No reader of Spark takes decimals with more."""


def keeps_values(given: pa.DataType, there: pa.DataType) -> bool:
    """
    Return whether values of one type are the same as another one's, or a safe cast fails.

    Without that, a cast drops zones, times of day and fields of structs, and rounds floats, silently.
    """
    types = pa.types
    if types.is_null(given) or in_utc(given) == in_utc(there):
        return True
    if types.is_struct(given) and types.is_struct(there):
        return [of.name for of in given] == [of.name for of in there] and all(
            keeps_values(here.type, other.type) for here, other in zip(given, there, strict=True)
        )
    if types.is_map(given) and types.is_map(there):
        return keeps_values(given.key_type, there.key_type) and keeps_values(given.item_type, there.item_type)
    if types.is_list(given) and types.is_list(there):
        return keeps_values(given.value_type, there.value_type)
    if types.is_floating(given):
        return bool(types.is_floating(there) and given.bit_width <= there.bit_width)
    if types.is_integer(given):
        return bool(types.is_integer(there) or types.is_floating(there) or types.is_decimal(there))
    if types.is_decimal(given):
        return bool(types.is_decimal(there) and there.precision <= _DIGITS_MAX)
    return any(is_of(given) and is_of(there) for is_of in (_is_text, _is_bytes))


def in_utc(given: pa.DataType) -> pa.DataType:
    """Return a type with times in UTC and microseconds, as it is stored; anything may be null."""
    if pa.types.is_timestamp(given):
        return pa.timestamp("us", None if given.tz is None else "UTC")
    if pa.types.is_list(given):
        return pa.list_(in_utc(given.value_type))
    if pa.types.is_map(given):
        return pa.map_(in_utc(given.key_type), in_utc(given.item_type))
    if pa.types.is_struct(given):
        return pa.struct([pa.field(column.name, in_utc(column.type)) for column in given])
    return given


def _is_text(given: pa.DataType) -> bool:
    return bool(pa.types.is_string(given) or pa.types.is_large_string(given))


def _is_bytes(given: pa.DataType) -> bool:
    return bool(pa.types.is_binary(given) or pa.types.is_large_binary(given))
