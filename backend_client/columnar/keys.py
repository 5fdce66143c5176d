"""
Encodes and decodes all keys of a batch at once, to the same bytes as `KeyCodec`.

No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.packing import pack_rows
from backend_client.state.codec import KeyCodec
from storage.errors import CorruptDataError

_ANY_TEXT = "surrogateescape"
"""How Python reads text that may be invalid UTF-8, such as text cast from Spark's binary."""


class KeyColumns:
    """
    Encodes and decodes the key columns of one operator.

    Args:
        key_schema: Spark's JSON text of the struct of the key columns.
        fields: The same columns as an Arrow schema.
    """

    def __init__(self, key_schema: str, fields: pa.Schema) -> None:
        KeyCodec(key_schema)  # refuses what cannot be a key
        self.fields = fields
        self._have_inner_numbers = any(pa.types.is_nested(kind) and _has_floats(kind) for kind in fields.types)

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return one key's bytes per row; columns that come from Spark may have other time zones and widths."""
        return pack_rows(
            [_cast(column, field.type) for column, field in zip(columns, self.fields, strict=True)], _packed
        )

    def keys_of(self, columns: Sequence[pa.Array]) -> list[bytes]:
        """Return the same as Python's bytes."""
        found: list[bytes] = self.encode(columns).to_pylist()
        return found

    def in_normal_form(self, columns: Sequence[pa.Array], encoded: pa.Array) -> list[pa.Array]:
        """Return the columns of encoded keys as Spark shows them: without minus zeros, inside values, too."""
        if not self._have_inner_numbers:
            return list(columns)
        keys, _ = self.decode(encoded.to_pylist(), with_number=False)
        return list(keys.columns)

    def decode(self, keys: Sequence[bytes], *, with_number: bool) -> tuple[pa.RecordBatch, list[int]]:
        """
        Return the key columns of encoded keys, and with `with_number` the number after each key.

        Raises:
            CorruptDataError: The bytes are not keys of this schema.
        """
        try:
            data = b"".join(keys)
            # The default limit of 100 MB may be too small for many keys, or for a single one. 0 means no limit.
            unpacker = msgpack.Unpacker(
                use_list=True, strict_map_key=False, max_buffer_size=len(data), unicode_errors=_ANY_TEXT
            )
            unpacker.feed(data)
            parts = list(unpacker)
            numbers = parts[1::2] if with_number else []
            rows = parts[::2] if with_number else parts
            if len(rows) != len(keys) or any(len(row) != len(self.fields) for row in rows):
                raise ValueError("they have other columns")
            columns = list(zip(*rows, strict=True)) or [()] * len(self.fields)
            arrays = [
                _array([_plain(value, field.type) for value in column], field.type)
                for column, field in zip(columns, self.fields, strict=True)
            ]
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException, msgpack.UnpackException) as error:
            why = f"{type(error).__name__}: {error}"
            raise CorruptDataError(f"stored keys of columnar state cannot be read: {why}") from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.fields), numbers


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # Arrow's cast damages slices of structs in which a field is always null.
    return column if column.type == kind else column.cast(kind)


def _packed(column: pa.Array) -> pa.Array:
    """Return the MessagePack of each value."""
    pack = msgpack.Packer(use_bin_type=True, unicode_errors=_ANY_TEXT).pack
    return pa.array(list(map(pack, _stored_forms(column))), pa.binary())


def _stored_forms(column: pa.Array) -> list[Any]:
    """
    Return the values as `KeyCodec` stores them (see `stored_forms`).

    They do not become Python's dates, times and text on the way: those of Spark may have years beyond 1 to 9999, which
    a time zone is enough for, and invalid UTF-8.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        parts = list(zip(*map(_stored_forms, column.flatten()), strict=True)) or [()] * len(column)
        return [list(part) if valid else None for part, valid in zip(parts, column.is_valid().to_pylist(), strict=True)]
    if pa.types.is_list(kind):
        items = iter(_stored_forms(column.flatten()))
        sizes = pc.list_value_length(column).to_pylist()
        return [None if size is None else [next(items) for _ in range(size)] for size in sizes]
    if pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif pa.types.is_timestamp(kind) or pa.types.is_time64(kind) or pa.types.is_duration(kind):
        column = column.view(pa.int64())
    elif pa.types.is_string(kind):
        column = column.view(pa.binary())
    values: list[Any] = column.to_pylist()
    if pa.types.is_string(kind):
        return [None if value is None else value.decode(errors=_ANY_TEXT) for value in values]
    if pa.types.is_decimal(kind):
        return [None if value is None else str(value) for value in values]
    if pa.types.is_floating(kind):
        # One NaN, and no minus zero.
        return [value if value is None else math.nan if math.isnan(value) else value + 0.0 for value in values]
    return values


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    # Arrow takes text that may be invalid UTF-8 as bytes only.
    found = pa.array(values, _with_bytes(kind))
    return found.view(kind) if pa.types.is_string(kind) else found.cast(kind, safe=False)


def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type with bytes in the place of text."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    return pa.list_(kind.value_field.with_type(_with_bytes(kind.value_type))) if pa.types.is_list(kind) else kind


def _has_floats(kind: pa.DataType) -> bool:
    """Return whether a type is or contains one in which two values can be one key."""
    if pa.types.is_nested(kind):
        return any(_has_floats(kind.field(at).type) for at in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value in the form that Arrow accepts for this type; timestamps stay integers, as in keys."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value.encode(errors=_ANY_TEXT)
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_struct(kind):
        return tuple(_plain(part, field.type) for field, part in zip(kind, value, strict=True))  # names may be the same
    if pa.types.is_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    return value
