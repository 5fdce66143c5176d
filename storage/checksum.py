"""Checksums of segments, segment objects and table files. They detect damage, not forgery. No I/O."""

from __future__ import annotations

from typing import TypeAlias

import xxhash

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes that need no copy to be hashed or written."""


def checksum64(data: BytesLike) -> int:
    """Return the XXH3 64-bit hash of `data` with seed 0: 0 <= checksum < 2**64."""
    return xxhash.xxh3_64_intdigest(data)


def checksum128(data: BytesLike) -> str:
    """Return the XXH3 128-bit hash of `data` as 32 hexadecimal digits; it names content that is stored once."""
    return xxhash.xxh3_128_hexdigest(data)


def running_checksum128() -> xxhash.xxh3_128:
    """Return a hash to `update` piece by piece, whose `hexdigest` is `checksum128` of all pieces together."""
    return xxhash.xxh3_128()
