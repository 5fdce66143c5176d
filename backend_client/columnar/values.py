"""
Encodes state columns as bytes, one value per key, all keys of a batch at once: data only, versioned (I15).

A value is: version (1 byte), a null bit per field (byte ``n // 8``, bit ``n % 8``), then the fields in the order of the
schema, little-endian, a boolean as a byte. Text and binary have their length in bytes (4 bytes) there, and their bytes
follow after the last field. A null field is zero. docs/columnar.md has the layout as a table.
No I/O.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import CorruptDataError, InvalidInputError

ENCODING = 1
"""Version of the layout; MessagePack values of other operators never begin with it."""

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]

_LENGTH = np.dtype("<u4")


class StateColumns:
    """
    Encodes and decodes the state of many keys.

    Args:
        schema: The state's fields; each may be null.

    Raises:
        InvalidInputError: A field's type is neither of fixed width nor text or binary.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._varying = [_is_varying(field.type) for field in schema]
        raw = [_raw_type(field) for field in schema]
        names = [f"f{position}" for position in range(len(raw))]
        null_bytes = (len(raw) + 7) // 8
        self._layout = np.dtype([("version", "u1"), ("nulls", "u1", (null_bytes,)), *zip(names, raw, strict=True)])
        self._names = names

    def encode(self, columns: pa.RecordBatch) -> pa.Array:
        """
        Return one binary value per row.

        Raises:
            InvalidInputError: The columns differ from the schema.
        """
        if columns.schema.names != self.schema.names:
            raise InvalidInputError(
                f"the processor returned the state columns {', '.join(columns.schema.names)}; its state_schema has "
                f"{', '.join(self.schema.names)}"
            )
        rows = columns.num_rows
        fixed = np.zeros(rows, self._layout)
        fixed["version"] = ENCODING
        tails: list[pa.Array] = []
        for position, (name, field) in enumerate(zip(self._names, self.schema, strict=True)):
            column = columns.column(position)
            if column.type != field.type:
                raise InvalidInputError(
                    f"the processor returned state column {field.name!r} as {column.type}; its state_schema has "
                    f"{field.type}"
                )
            if column.null_count:
                null = pc.is_null(column).to_numpy(zero_copy_only=False)
                fixed["nulls"][:, position // 8] |= null.astype(np.uint8) << np.uint8(position % 8)
            if self._varying[position]:
                tails.append(pc.fill_null(column.cast(pa.large_binary()), b""))
                fixed[name] = pc.binary_length(tails[-1]).to_numpy(zero_copy_only=False)
            else:
                fixed[name] = _to_raw(column, self._layout[name])
        whole = binary_array(fixed.view("u1"), np.full(rows, self._layout.itemsize))
        if not tails:
            return whole
        joined = pc.binary_join_element_wise(whole.cast(pa.large_binary()), *tails, pa.scalar(b"", pa.large_binary()))
        return joined.cast(pa.binary())

    def decode(self, values: pa.Array) -> tuple[pa.RecordBatch, Bools]:
        """
        Return one row per binary value, all null for a null value, and which values are present.

        Raises:
            CorruptDataError: A value does not have this schema.
        """
        present = valid(values)
        stored = values.drop_null() if values.null_count else values
        data = value_bytes(stored)
        width = self._layout.itemsize
        sizes = np.diff(_offsets(stored)).astype(np.int64)
        if len(sizes) and sizes.min() < width:
            raise _corrupt(f"it has {sizes.min()} bytes, at least {width} are needed")
        begins = np.cumsum(sizes) - sizes
        if len(data) == width * len(sizes):
            fixed = data.view(self._layout)
        else:
            fixed = data[begins[:, None] + np.arange(width)].reshape(-1).view(self._layout)
        if (fixed["version"] != ENCODING).any():
            raise _corrupt(f"encoding {fixed['version'][fixed['version'] != ENCODING][0]} is unknown")
        lengths = [
            fixed[name].astype(np.int64) for name, varying in zip(self._names, self._varying, strict=True) if varying
        ]
        if (np.sum([np.full(len(sizes), width), *lengths], axis=0) != sizes).any():
            raise _corrupt("its length does not match its fields")
        arrays, starts = [], begins + width
        for position, (name, field) in enumerate(zip(self._names, self.schema, strict=True)):
            nulls = np.ones(len(values), np.bool_)
            nulls[present] = (fixed["nulls"][:, position // 8] >> (position % 8)) & 1
            if self._varying[position]:
                # A cast would refuse text that is invalid UTF-8; Spark's may be.
                arrays.append(_scattered_bytes(data, starts, fixed[name], present, nulls).view(field.type))
                starts = starts + fixed[name]
            else:
                spread = np.zeros(len(values), self._layout[name])
                spread[present] = fixed[name]
                arrays.append(_from_raw(spread, nulls, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema), present


def valid(column: pa.Array) -> Bools:
    """Return which values of a column are not null."""
    found: Bools = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def micros(times: pa.Array, null: int = 0) -> Ints:
    """Return timestamps in microseconds since 1970, `null` for a null."""
    numbers = times.cast(pa.timestamp("us", times.type.tz)).view(pa.int64())
    found: Ints = pc.fill_null(numbers, null).to_numpy(zero_copy_only=False)
    return found


def split_heads(values: pa.Array, width: int) -> tuple[npt.NDArray[np.uint8], pa.Array]:
    """
    Return the first `width` bytes of each value, zeros for a null, and the values without them.

    Raises:
        CorruptDataError: A value is shorter than that.
    """
    present = valid(values)
    stored = values.drop_null()
    data, sizes = value_bytes(stored), np.diff(_offsets(stored)).astype(np.int64)
    if (sizes < width).any():
        raise _corrupt("it is shorter than its end")
    at = (np.cumsum(sizes) - sizes)[:, None] + np.arange(width)
    heads = np.zeros((len(values), width), np.uint8)
    heads[present] = data[at]
    is_rest = np.ones(len(data), np.bool_)
    is_rest[at] = False
    rest_sizes = np.zeros(len(values), np.int64)
    rest_sizes[present] = sizes - width
    return heads, binary_array(data[is_rest], rest_sizes, ~present)


def value_bytes(values: pa.Array) -> npt.NDArray[np.uint8]:
    """Return the concatenated bytes of a binary array's values."""
    buffer, offsets = values.buffers()[2], _offsets(values)
    if buffer is None or not len(values):
        return np.zeros(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]]


def value_sizes(values: pa.Array) -> Ints:
    """Return the number of bytes of each value of a binary array without nulls."""
    return np.diff(_offsets(values)).astype(np.int64)


def _offsets(values: pa.Array) -> npt.NDArray[np.int32]:
    buffer = values.buffers()[1]
    if buffer is None:
        return np.zeros(len(values) + 1, np.int32)
    return np.frombuffer(buffer, np.int32)[values.offset : values.offset + len(values) + 1]


def _corrupt(why: str) -> CorruptDataError:
    return CorruptDataError(f"a stored value of columnar state cannot be read: {why}")


def _is_varying(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _raw_type(field: pa.Field) -> Any:
    kind = field.type
    if _is_varying(kind):
        return _LENGTH
    if pa.types.is_boolean(kind):
        return np.dtype("u1")
    if pa.types.is_decimal128(kind):
        return np.dtype("V16")
    if (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_duration(kind)
    ):
        return np.dtype(f"<u{kind.bit_width // 8}")
    raise InvalidInputError(
        f"columnar state cannot hold {field.name!r} of type {kind}; use numbers, decimals, booleans, times, "
        "text or binary"
    )


def _to_raw(column: pa.Array, raw: Any) -> Any:
    if pa.types.is_boolean(column.type):
        return pc.fill_null(column, False).cast(pa.uint8()).to_numpy(zero_copy_only=False)
    width = raw.itemsize
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(len(column), raw)
    values = np.frombuffer(buffer, raw, count=len(column), offset=column.offset * width)
    if column.null_count:
        values = values.copy()
        values[pc.is_null(column).to_numpy(zero_copy_only=False)] = np.zeros((), raw)
    return values


def _from_raw(values: Any, nulls: Bools, kind: pa.DataType) -> pa.Array:
    validity = pa.py_buffer(np.packbits(~nulls, bitorder="little")) if nulls.any() else None
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(
            kind, len(values), [validity, pa.py_buffer(np.packbits(values != 0, bitorder="little"))]
        )
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(values)])


def binary_array(data: npt.NDArray[np.uint8], sizes: Ints, nulls: Bools | None = None) -> pa.Array:
    """Return a binary array of adjacent values; `InvalidInputError` if they exceed 32-bit offsets."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        raise InvalidInputError("the state of one part of a batch exceeds 2 GiB; use more partitions")
    validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    return pa.Array.from_buffers(
        pa.binary(), len(sizes), [validity, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    )


def _scattered_bytes(
    data: npt.NDArray[np.uint8], begins: Ints, lengths: npt.NDArray[np.uint32], present: Bools, nulls: Bools
) -> pa.Array:
    """Return the bytes at `begins` as the values of the present rows."""
    sizes = lengths.astype(np.int64)
    before = np.cumsum(sizes) - sizes
    picked = data[np.repeat(begins - before, sizes) + np.arange(sizes.sum())]
    spread = np.zeros(len(present), np.int64)
    spread[present] = sizes
    return binary_array(picked, spread, nulls)
