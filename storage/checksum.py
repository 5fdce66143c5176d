"""The checksum of segments and of segment objects. Finds damage, not forgery. No I/O."""

from __future__ import annotations

from typing import TypeAlias

import xxhash

BytesLike: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes that need no copy to be hashed or written."""


def checksum64(data: BytesLike) -> int:
    """Return the XXH3 64-bit hash of `data` with seed 0: 0 <= checksum < 2**64."""
    return xxhash.xxh3_64_intdigest(data)
