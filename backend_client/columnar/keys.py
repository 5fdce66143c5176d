"""
Encodes and decodes all keys of a batch at once, to the same bytes as `KeyCodec`.

No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa

from backend_client.columnar.packing import pack_rows
from backend_client.state.codec import KeyCodec
from storage.errors import CorruptDataError

_ANY_TEXT = "surrogateescape"


class KeyColumns:
    """
    Encodes and decodes the key columns of one operator.

    Args:
        key_schema: Spark's JSON text of the struct of the key columns.
        fields: The same columns as an Arrow schema.
    """

    def __init__(self, key_schema: str, fields: pa.Schema) -> None:
        self.fields = fields
        self._encode = KeyCodec(key_schema).encode_all

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Return one key's bytes per row."""
        packed = pack_rows(columns)
        if packed is None:
            rows = zip(*(column.to_pylist() for column in columns), strict=True)
            packed = pa.array(self._encode(rows), pa.binary())
        return packed

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


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_string(kind):
        return pa.array(values, kind)
    # Text cast from Spark's binary may be invalid UTF-8, which Arrow takes as bytes only.
    encoded = [None if value is None else value.encode(errors=_ANY_TEXT) for value in values]
    return pa.array(encoded, pa.binary()).view(kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Return a value in the form that Arrow accepts for this type; timestamps stay integers, as in keys."""
    if value is None:
        return None
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_struct(kind):
        return {field.name: _plain(part, field.type) for field, part in zip(kind, value, strict=True)}
    if pa.types.is_list(kind):
        return [_plain(part, kind.value_type) for part in value]
    return value
