"""
Spark's hash of a grouping key, computed from the key's stored bytes.

Spark places rows by ``pmod(hash(key columns), max_parallelism)``: Murmur3 in 32 bits with seed 42, folded over columns,
fields and elements; a null changes nothing. Stored forms have all that it reads, see `stored_forms`.
No I/O.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import msgpack

from backend_client.state.stored_forms import DECIMAL_CONTEXT, base_type, decimal_digits
from storage.errors import InvalidInputError

Fold = Callable[[Any, int], int]
"""Returns the hash of a stored, non-null value, given that of the values before it."""

_SEED = 42
_BITS = 0xFFFFFFFF
_LONG_DIGITS = 18
"""A decimal type of at most this precision is hashed as a 64-bit number, any other as bytes."""


def _mix(seed: int, word: int) -> int:
    word = word * 0xCC9E2D51 & _BITS
    word = (word << 15 | word >> 17) * 0x1B873593 & _BITS
    seed ^= word
    return ((seed << 13 | seed >> 19) & _BITS) * 5 + 0xE6546B64 & _BITS


def _finish(seed: int, length: int) -> int:
    seed ^= length
    seed = (seed ^ seed >> 16) * 0x85EBCA6B & _BITS
    seed = (seed ^ seed >> 13) * 0xC2B2AE35 & _BITS
    return seed ^ seed >> 16


def _of_int(value: int, seed: int) -> int:
    return _finish(_mix(seed, value & _BITS), 4)


def _of_long(value: int, seed: int) -> int:
    return _finish(_mix(_mix(seed, value & _BITS), value >> 32 & _BITS), 8)


def _of_bytes(value: bytes, seed: int) -> int:
    whole = len(value) & ~3
    for (word,) in struct.iter_unpack("<I", value[:whole]):
        seed = _mix(seed, word)
    for byte in value[whole:]:  # signed, one word each
        seed = _mix(seed, byte - 256 & _BITS if byte > 127 else byte)
    return _finish(seed, len(value))


def _of_float(value: float, seed: int) -> int:
    bits = 0x7FC00000 if math.isnan(value) else struct.unpack("<i", struct.pack("<f", value + 0.0))[0]
    return _of_int(bits, seed)


def _of_double(value: float, seed: int) -> int:
    bits = 0x7FF8 << 48 if math.isnan(value) else struct.unpack("<q", struct.pack("<d", value + 0.0))[0]
    return _of_long(bits, seed)


def _of_decimal(precision: int, scale: int) -> Fold:
    def fold(value: bytes, seed: int) -> int:
        unscaled = int(Decimal(value.decode()).scaleb(scale, DECIMAL_CONTEXT))
        if precision <= _LONG_DIGITS:
            return _of_long(unscaled, seed)
        # As Java's BigInteger.toByteArray: as few bytes as hold the sign.
        bits = (unscaled if unscaled >= 0 else ~unscaled).bit_length()
        return _of_bytes(unscaled.to_bytes(bits // 8 + 1, "big", signed=True), seed)

    return fold


_SIMPLE: dict[str, Fold] = {
    "boolean": _of_int,
    **dict.fromkeys(("byte", "short", "integer", "date"), _of_int),
    **dict.fromkeys(
        ("long", "timestamp", "timestamp_ntz", "interval day to second"),
        _of_long,
    ),
    "float": _of_float,
    "double": _of_double,
    "string": _of_bytes,
    "binary": _of_bytes,
    "void": lambda _, seed: seed,
}


def _fold(kind: Any, path: str) -> Fold:
    if isinstance(kind, dict):
        return _compound(kind, path)
    if (digits := decimal_digits(kind)) is not None:
        return _of_decimal(*digits)
    # Text with a collation of its own is hashed by that, which only Spark knows.
    simple = None if kind.startswith("string ") else _SIMPLE.get(base_type(kind))
    if simple is None:
        raise InvalidInputError(
            f"key column {path} is of type {kind}, whose hash is not known outside Spark: its keys cannot be given "
            "other key groups. Fork the job with the max_parallelism that it has"
        )
    return simple


def _compound(kind: dict[str, Any], path: str) -> Fold:
    if kind["type"] == "array":
        element = _fold(kind["elementType"], f"{path}[]")

        def fold_array(values: Sequence[Any], seed: int) -> int:
            for value in values:
                seed = seed if value is None else element(value, seed)
            return seed

        return fold_array
    if kind["type"] == "struct":
        return _struct(kind, path)
    raise InvalidInputError(f"key column {path} contains a {kind['type']}, which cannot be a grouping key")


def _struct(kind: dict[str, Any], path: str) -> Fold:
    names = [field["name"] for field in kind["fields"]]
    parts = [
        _fold(field["type"], f"{path}.{name}" if path else name)
        for field, name in zip(kind["fields"], names, strict=True)
    ]

    def fold(values: Sequence[Any], seed: int) -> int:
        for part, value in zip(parts, values, strict=True):
            seed = seed if value is None else part(value, seed)
        return seed

    return fold


class KeyHash:
    """
    Computes the hash of stored keys.

    Args:
        schema: Spark's JSON text of the struct of the key columns.

    Raises:
        InvalidInputError: A column has a type whose hash is not known here.
    """

    def __init__(self, schema: str) -> None:
        self._fold = _struct(json.loads(schema), "")

    def first(self, data: bytes) -> tuple[bytes, int]:
        """
        Return the key with which `data` begins, and its hash, from 0 up to 2^32: Spark's as an unsigned number.

        Raises:
            ValueError: It begins with no key of this schema.
        """
        key = data
        try:
            parts = msgpack.unpackb(data, use_list=False, raw=True)
        except msgpack.ExtraData as error:
            parts, key = error.unpacked, data[: len(data) - len(error.extra)]
        try:
            return key, self._fold(parts, _SEED)
        except (TypeError, ArithmeticError, struct.error) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def key_group_of(hashed: int, max_parallelism: int) -> int:
    """Return ``pmod(hash, max_parallelism)`` of an unsigned hash."""
    return (hashed - (1 << 32) if hashed >> 31 else hashed) % max_parallelism
