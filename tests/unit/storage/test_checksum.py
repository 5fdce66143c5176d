"""The checksum is the published algorithm, so other programs can compute it."""

from __future__ import annotations

from storage.checksum import checksum64


def test_checksum_has_known_value() -> None:
    """XXH3-64 with seed 0 of no bytes has the value in the specification."""
    assert checksum64(b"") == 0x2D06800538D394C2


def test_checksum_takes_any_buffer() -> None:
    """bytes, bytearray and views with the same bytes have the same checksum."""
    data = b"some bytes"
    assert checksum64(data) == checksum64(bytearray(data)) == checksum64(memoryview(b"_" + data)[1:])
