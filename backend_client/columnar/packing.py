"""
Packs rows as MessagePack arrays, all at once, to the same bytes as MessagePack's own packer.

No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.values import Ints, binary_array

_NULL = b"\xc0"
_FALSE, _TRUE = b"\xc2", b"\xc3"
_DOUBLE = b"\xcb"
_FIXED_ARRAY, _ARRAY_16 = 0x90, b"\xdc"
_FIXED_ARRAY_MAX = 15

# First bytes by the number of bytes that follow; a number that fits into the first byte has none.
_UNSIGNED = {1: 0xCC, 2: 0xCD, 4: 0xCE, 8: 0xCF}
_SIGNED = {1: 0xD0, 2: 0xD1, 4: 0xD2, 8: 0xD3}
_TEXT = {1: 0xD9, 2: 0xDA, 4: 0xDB}
_BINARY = {1: 0xC4, 2: 0xC5, 4: 0xC6}
_FIXED_TEXT, _FIXED_TEXT_MAX = 0xA0, 31


def pack_rows(columns: Sequence[pa.Array], pack_other: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """
    Return one binary value per row.

    Args:
        columns: At least one.
        pack_other: Packs the values of a column whose type has no packer here, one by one.
    """
    count = len(columns)
    head = bytes([_FIXED_ARRAY + count]) if count <= _FIXED_ARRAY_MAX else _ARRAY_16 + count.to_bytes(2, "big")
    packed = ((column, _pack(column)) for column in columns)
    parts = [pack_other(column) if part is None else part for column, part in packed]
    return joined(pa.scalar(head, pa.binary()), *parts)


def pack_integers(values: Ints) -> pa.Array:
    """Return one binary value per integer."""
    width = np.select(
        [
            (values >= -0x20) & (values < 0x80),
            (values >= -0x80) & (values < 0x100),
            (values >= -0x8000) & (values < 0x10000),
            (values >= -0x8000_0000) & (values < 0x1_0000_0000),
        ],
        [0, 1, 2, 4],
        8,
    )
    first = np.where(width == 0, values, 0).astype(np.uint8)
    for bytes_behind, code in _UNSIGNED.items():
        first[(width == bytes_behind) & (values >= 0)] = code
        first[(width == bytes_behind) & (values < 0)] = _SIGNED[bytes_behind]
    return _numbers(first, values, width)


def joined(*parts: Any) -> pa.Array:
    """Return the concatenation, row by row, of binary arrays and scalars."""
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def of_equal_width(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Return a binary value per row of bytes."""
    return binary_array(np.ascontiguousarray(rows), np.full(len(rows), rows.shape[1]))


def _pack(column: pa.Array) -> pa.Array | None:
    kind = column.type
    if pa.types.is_null(kind):
        packed = pa.nulls(len(column), pa.binary())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
        packed = joined(_lengths(sizes, is_text=pa.types.is_string(kind)), column.cast(pa.binary()))
    elif pa.types.is_boolean(kind):
        packed = pc.if_else(column, pa.scalar(_TRUE, pa.binary()), pa.scalar(_FALSE, pa.binary()))
    elif pa.types.is_float32(kind) or pa.types.is_float64(kind):
        values = pc.fill_null(column, 0).to_numpy().astype(np.float64)
        values = (
            np.where(np.isnan(values), np.nan, values) + 0.0
        )  # as in comparisons of keys: one NaN, and no minus zero
        rows = values.astype(">f8").view(np.uint8).reshape(-1, 8)
        packed = joined(pa.scalar(_DOUBLE, pa.binary()), of_equal_width(rows))
    elif pa.types.is_signed_integer(kind):
        packed = pack_integers(pc.fill_null(column, 0).to_numpy().astype(np.int64))
    elif pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.unit == "us"):
        numbers = column.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
        packed = pack_integers(pc.fill_null(numbers, 0).to_numpy().astype(np.int64))
    else:
        return None
    return pc.if_else(column.is_valid(), packed, pa.scalar(_NULL, pa.binary())) if column.null_count else packed


def _lengths(sizes: npt.NDArray[np.int32], *, is_text: bool) -> pa.Array:
    """Return the MessagePack headers of texts or bytes of these sizes."""
    codes = _TEXT if is_text else _BINARY
    width = np.select([sizes < 0x100, sizes < 0x10000], [1, 2], 4)
    first = np.select([width == 1, width == 2], [codes[1], codes[2]], codes[4]).astype(np.uint8)
    if is_text:
        is_short = sizes <= _FIXED_TEXT_MAX
        width[is_short] = 0
        first[is_short] = _FIXED_TEXT + sizes[is_short]
    return _numbers(first, sizes, width)


def _numbers(first: npt.NDArray[np.uint8], values: npt.NDArray[Any], width: npt.NDArray[Any]) -> pa.Array:
    """Return binary values: a first byte, then the last `width` bytes of a big-endian integer."""
    rows = np.empty((len(values), 9), np.uint8)
    rows[:, 0] = first
    rows[:, 1:] = values.astype(">i8").view(np.uint8).reshape(-1, 8)
    is_used = np.arange(9) >= 9 - width[:, None]
    is_used[:, 0] = True
    return binary_array(rows[is_used], width + 1)
