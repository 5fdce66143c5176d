"""Segment objects: written data is read back, and for any damage the error names the object (I10)."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from storage import segment_format
from storage.checksum import checksum64
from storage.errors import CorruptDataError, InvalidInputError
from storage.segment_format import (
    FOOTER_BYTES,
    HEADER_BYTES,
    decode_index,
    decode_object,
    encode_object,
    index_offset,
)
from tests.unit.storage.segments import encoded, segment

KEY = "job/segments/host/1.seg"
PAYLOADS = (b"first", b"", b"third payload")


def rebuilt(data: bytes, change: Callable[[list[dict[str, Any]]], Any], **footer_fields: int) -> bytes:
    """Return the object with a changed index and valid checksums, as made by a wrong writer rather than a bad disk."""
    begin = index_offset(data, data, len(data), KEY)
    rows = json.loads(data[begin:-FOOTER_BYTES])
    index = json.dumps(change(rows), separators=(",", ":")).encode()
    fields = {
        "offset": begin,
        "size": begin + len(index) + FOOTER_BYTES,
        "checksum": checksum64(index),
        "index_size": len(index),
        "count": len(rows),
        "version": 1,
        "flags": 0,
        "reserved": 0,
        **footer_fields,
    }
    footer = struct.pack(">QQQIIHHI", *fields.values())
    return data[:begin] + index + footer + struct.pack(">Q8s", checksum64(data[:HEADER_BYTES] + footer), b"DSTLEND\n")


def test_object_is_read_back() -> None:
    """I10: entries and payloads are read back unchanged and in order."""
    data, entries = encoded(*PAYLOADS)
    decoded = decode_object(data, KEY)
    assert [entry for entry, _ in decoded] == entries
    assert [bytes(payload) for _, payload in decoded] == list(PAYLOADS)
    assert all(data[entry.offset_bytes : entry.end_bytes] == payload for entry, payload in decoded)


def test_layout_is_the_documented_one() -> None:
    """The bytes are those of docs/segment-format.md, version 1; a change needs a new version."""
    data, _ = encoded(*PAYLOADS)
    assert (HEADER_BYTES, FOOTER_BYTES) == (16, 56)
    assert data[:16] == bytes.fromhex("894453544c0d0a1a 0001 0000 00000000")
    assert data[16:34] == b"".join(PAYLOADS)
    offset, size, index_checksum, index_size, count, version, flags, reserved = struct.unpack(
        ">QQQIIHHI", data[-56:-16]
    )
    assert (offset, size, index_size, count, version, flags, reserved) == (34, len(data), size - 90, 3, 1, 0, 0)
    index = data[34:-56]
    assert index_checksum == checksum64(index)
    assert data[-16:-8] == checksum64(data[:16] + data[-56:-16]).to_bytes(8, "big")
    assert data[-8:] == b"DSTLEND\n"
    assert json.loads(index)[2] == {
        "job": "job",
        "operator": "op",
        "checkpoint": 7,
        "epoch": 3,
        "attempt": 102,
        "partition": 2,
        "sqn": 0,
        "key_groups": "00008-00011",
        "count": 1,
        "offset": 21,
        "size": 13,
        "checksum": f"{checksum64(PAYLOADS[2]):016x}",
    }


def test_payloads_are_not_copied() -> None:
    """The buffers to write are the given payloads, and decoded payloads are views."""
    payload = bytes(1000)
    buffers, _ = encode_object([segment(0, payload)])
    assert buffers[1] is payload
    data = b"".join(buffers)
    assert decode_object(data, KEY)[0][1].obj is data


def test_every_flipped_bit_is_found() -> None:
    """I10: each flipped bit, anywhere in the object, is an error that names the object."""
    data = bytearray(encoded(*PAYLOADS)[0])
    for position in range(len(data) * 8):
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(data, KEY)
        data[position // 8] ^= 1 << position % 8
    assert len(decode_object(data, KEY)) == len(PAYLOADS)


def test_every_cut_is_found() -> None:
    """I10: an object that lacks bytes at its start or end is an error."""
    data = encoded(*PAYLOADS)[0]
    for size in range(len(data)):
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(data[:size], KEY)
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(data[len(data) - size :], KEY)


def test_every_extension_is_found() -> None:
    """I10: bytes after, before or within an object, even copies of its own, are an error."""
    data = encoded(*PAYLOADS)[0]
    for damaged in (data + b"\0", data + data, data + data[-FOOTER_BYTES:], b"\0" + data, data[:20] + b"x" + data[20:]):
        with pytest.raises(CorruptDataError, match=KEY):
            decode_object(damaged, KEY)


def test_newer_version_is_reported() -> None:
    """The error for a newer object says that the program is too old, not only that the object is damaged."""
    data = bytearray(encoded(*PAYLOADS)[0])
    data[8:10] = (2).to_bytes(2, "big")
    with pytest.raises(CorruptDataError, match=r"version 2 is newer than 1, the newest that this program reads"):
        decode_object(data, KEY)


@pytest.mark.parametrize(
    ("change", "defect"),
    [
        (lambda rows: rows[0], "not a list"),
        (lambda rows: rows[:2], "2 entries where the footer states 3"),
        (lambda rows: rows[::-1], "begins at 21 where the one before ends at 16"),
        (lambda rows: [rows[0], rows[0] | {"offset": 21, "size": 0}, rows[2]], "occurs twice"),
        (lambda rows: [rows[0] | {"size": 4}, *rows[1:]], "begins at 21 where the one before ends at 20"),
        (lambda rows: [*rows[:2], rows[2] | {"size": 12}], "ends at 33 where the index begins at 34"),
        (lambda rows: [*rows[:2], rows[2] | {"size": -1}], "bad entry"),
        (lambda rows: [*rows[:2], rows[2] | {"job": "../x"}], "bad entry"),
        (lambda rows: [*rows[:2], {}], "bad entry"),
        (lambda rows: [*rows[:2], rows[2] | {"checksum": "0" * 16}], "checksum of a segment"),
    ],
)
def test_wrong_index_is_found(change: Callable[[list[dict[str, Any]]], Any], defect: str) -> None:
    """I10: an index that contradicts the object is an error even if all its checksums are right."""
    with pytest.raises(CorruptDataError, match=f"is damaged: .*{defect}"):
        decode_object(rebuilt(encoded(*PAYLOADS)[0], change), KEY)


@pytest.mark.parametrize(
    "fields",
    [{"version": 2}, {"flags": 1}, {"reserved": 1}, {"size": 1}, {"offset": 0}, {"offset": 33}, {"index_size": 1}],
)
def test_wrong_footer_is_found(fields: dict[str, int]) -> None:
    """I10: a footer that contradicts header or object is an error even if its checksum is right."""
    with pytest.raises(CorruptDataError, match=KEY):
        decode_object(rebuilt(encoded(*PAYLOADS)[0], lambda rows: rows, **fields), KEY)


def test_object_without_segments_is_found() -> None:
    """An empty object is refused, since no writer makes one."""
    data = encoded(b"")[0]
    with pytest.raises(CorruptDataError, match="0 entries"):
        decode_object(rebuilt(data, lambda _: [], count=0), KEY)


def test_index_is_decoded_from_both_ends() -> None:
    """I10: the first 16 bytes and a tail that includes the index are enough to know an object's content."""
    data, entries = encoded(*PAYLOADS)
    begin = index_offset(data[:HEADER_BYTES], data[-FOOTER_BYTES:], len(data), KEY)
    assert decode_index(data[:HEADER_BYTES], data[begin:], len(data), KEY) == entries
    with pytest.raises(InvalidInputError, match="whole index"):
        decode_index(data[:HEADER_BYTES], data[begin + 1 :], len(data), KEY)


def test_bad_segments_are_refused() -> None:
    """I8, I10: no segments, a repeated one, or one with a wrong checksum are not written."""
    good = segment(0, b"x")
    with pytest.raises(InvalidInputError, match=r"1\.\.65536"):
        encode_object([])
    with pytest.raises(InvalidInputError, match="twice"):
        encode_object([good, segment(0, b"y")])
    with pytest.raises(InvalidInputError, match="does not match its payload"):
        encode_object([dataclasses.replace(good, checksum=good.checksum ^ 1)])


def test_too_large_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that a reader would refuse is not written."""
    monkeypatch.setattr(segment_format, "OBJECT_BYTES_MAX", 400)
    with pytest.raises(InvalidInputError, match="too large"):
        encode_object([segment(0, bytes(200))])
    with pytest.raises(InvalidInputError, match="too large"):
        encode_object([segment(0, bytes(200)), segment(1, bytes(200))])
