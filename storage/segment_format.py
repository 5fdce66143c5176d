"""
Segment objects as bytes: header, payloads, index, footer. No I/O.

Layout, big-endian; docs/segment-format.md has the tables:

    header 16 · payload of segment 1 · … · payload of segment n · index (JSON) · footer 56

Invariants:
1. Every byte of an object is covered by a checksum, so a flipped bit, a cut or an extension is found (I10).
2. Payloads are contiguous from the header's end to the index's start, in the order of the index.
3. A change set occurs at most once in an object (I8).
4. Payloads are never copied, neither by encoding nor by decoding.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from storage.checksum import BytesLike, checksum64
from storage.errors import CorruptDataError, InvalidInputError
from storage.model import Segment, SegmentEntry
from storage.validation import OBJECT_BYTES_MAX, SEGMENT_BYTES_MAX

__all__ = [
    "FOOTER_BYTES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "INDEX_BYTES_MAX",
    "OBJECT_BYTES_MAX",
    "SEGMENTS_MAX",
    "SEGMENT_BYTES_MAX",
    "decode_index",
    "decode_object",
    "encode_object",
    "index_offset",
    "verify_payload",
]

FORMAT_VERSION = 1
"""The version that this program writes and the newest that it reads."""

SEGMENTS_MAX = 65_536
"""The largest number of segments in one object."""

INDEX_BYTES_MAX = 2**26
"""The largest index: 64 MiB."""

# The high first byte and both line ends reveal an object that was transferred as text.
_HEADER_MAGIC = b"\x89DSTL\r\n\x1a"
_FOOTER_MAGIC = b"DSTLEND\n"
_FLAGS = 0
_RESERVED = 0

_HEADER = struct.Struct(">8sHHI")
_FOOTER_FIELDS = struct.Struct(">QQQIIHHI")
_FOOTER_SEAL = struct.Struct(">Q8s")

HEADER_BYTES = _HEADER.size
FOOTER_BYTES = _FOOTER_FIELDS.size + _FOOTER_SEAL.size

_HEADER_BYTES_V1 = _HEADER.pack(_HEADER_MAGIC, FORMAT_VERSION, _FLAGS, _RESERVED)


@dataclass(frozen=True, slots=True)
class _Footer:
    index_offset: int
    object_size: int
    index_checksum: int
    index_size: int
    segment_count: int


def encode_object(segments: Sequence[Segment]) -> tuple[list[BytesLike], list[SegmentEntry]]:
    """
    Encode segments as one segment object.

    Args:
        segments: 1..SEGMENTS_MAX, with distinct ids; their payloads must not change until the object is written.

    Returns:
        The buffers of the object, in order (header, the payloads themselves, index, footer), and the entries of its
        index, in the order of `segments`.

    Raises:
        InvalidInputError: No or too many segments, a duplicate id, a wrong checksum, or an object larger than
            OBJECT_BYTES_MAX. Caller bug; do not retry.
    """
    if not 1 <= len(segments) <= SEGMENTS_MAX:
        raise InvalidInputError(f"an object holds 1..{SEGMENTS_MAX} segments, not {len(segments)}")
    entries = _place(segments)
    index = json.dumps([entry.to_dict() for entry in entries], separators=(",", ":")).encode()
    offset = entries[-1].end_bytes
    object_size = offset + len(index) + FOOTER_BYTES
    if len(index) > INDEX_BYTES_MAX or object_size > OBJECT_BYTES_MAX:
        raise InvalidInputError(
            f"an object of {object_size} bytes with an index of {len(index)} bytes is too large: "
            f"at most {OBJECT_BYTES_MAX} and {INDEX_BYTES_MAX} bytes"
        )
    footer = _encode_footer(_Footer(offset, object_size, checksum64(index), len(index), len(entries)))
    return [_HEADER_BYTES_V1, *(segment.payload for segment in segments), index, footer], entries


def index_offset(header: BytesLike, tail: BytesLike, object_size: int, object_key: str) -> int:
    """
    Return the offset of an object's index, from the object's first and last bytes.

    Args:
        header: The first HEADER_BYTES or more bytes of the object.
        tail: The last FOOTER_BYTES or more bytes of the object.
        object_size: Length of the object in bytes.
        object_key: Named in errors.

    Raises:
        CorruptDataError: Header or footer is damaged, or of a newer version.
    """
    return _decode_footer(header, tail, object_size, object_key).index_offset


def decode_index(header: BytesLike, tail: BytesLike, object_size: int, object_key: str) -> list[SegmentEntry]:
    """
    Decode the index of an object from its first and last bytes, and verify all of them.

    Args:
        header: The first HEADER_BYTES or more bytes of the object.
        tail: The last bytes of the object, from `index_offset` or before.
        object_size: Length of the object in bytes.
        object_key: Named in errors.

    Returns:
        The entries, by ascending offset; contiguous, they fill the object from the header to the index.

    Raises:
        InvalidInputError: `tail` does not reach back to the index. Caller bug.
        CorruptDataError: Header, index or footer is damaged, or of a newer version.
    """
    footer = _decode_footer(header, tail, object_size, object_key)
    tail_offset = object_size - len(tail)
    if tail_offset > footer.index_offset:
        raise InvalidInputError(
            "tail does not hold the whole index", key=object_key, index_size_bytes=footer.index_size
        )
    begin = footer.index_offset - tail_offset
    index = memoryview(tail)[begin : begin + footer.index_size]
    if checksum64(index) != footer.index_checksum:
        _corrupt(object_key, "the checksum of the index does not match")
    entries = _parse_index(bytes(index), object_key)
    _check_index(entries, footer, object_key)
    return entries


def decode_object(data: BytesLike, object_key: str) -> list[tuple[SegmentEntry, memoryview]]:
    """
    Decode a whole object and verify every byte of it.

    Args:
        data: The bytes of the object, all of them.
        object_key: Named in errors.

    Returns:
        Each entry with a view of its payload, by ascending offset; the views keep `data` alive.

    Raises:
        CorruptDataError: Any byte is damaged, or the object is of a newer version.
    """
    view = memoryview(data).cast("B").toreadonly()
    decoded = []
    for entry in decode_index(view, view, len(view), object_key):
        payload = view[entry.offset_bytes : entry.end_bytes]
        verify_payload(entry, payload, object_key)
        decoded.append((entry, payload))
    return decoded


def verify_payload(entry: SegmentEntry, payload: BytesLike, object_key: str) -> None:
    """Raise `CorruptDataError` unless `payload` has the length and the checksum that its entry states."""
    if len(payload) != entry.size_bytes:
        _corrupt(object_key, f"a segment has {len(payload)} of {entry.size_bytes} bytes", offset=entry.offset_bytes)
    if checksum64(payload) != entry.checksum:
        _corrupt(object_key, "the checksum of a segment does not match", offset=entry.offset_bytes)


def _place(segments: Sequence[Segment]) -> list[SegmentEntry]:
    """Assign contiguous offsets to the payloads, after the header."""
    entries = []
    offset = HEADER_BYTES
    for segment in segments:
        if checksum64(segment.payload) != segment.checksum:
            raise InvalidInputError("the checksum of a segment does not match its payload", **segment.id.to_dict())
        size = segment.size_bytes
        if offset + size > OBJECT_BYTES_MAX:
            raise InvalidInputError(f"the segments are too large for one object of {OBJECT_BYTES_MAX} bytes")
        entries.append(
            SegmentEntry(segment.id, segment.key_groups, segment.count, offset, size, segment.checksum, segment.kind)
        )
        offset += size
    if len({entry.id for entry in entries}) != len(entries):
        raise InvalidInputError("a change set occurs twice among the segments of one object")
    return entries


def _encode_footer(footer: _Footer) -> bytes:
    fields = _FOOTER_FIELDS.pack(
        footer.index_offset,
        footer.object_size,
        footer.index_checksum,
        footer.index_size,
        footer.segment_count,
        FORMAT_VERSION,
        _FLAGS,
        _RESERVED,
    )
    return fields + _FOOTER_SEAL.pack(checksum64(_HEADER_BYTES_V1 + fields), _FOOTER_MAGIC)


def _decode_footer(header: BytesLike, tail: BytesLike, object_size: int, key: str) -> _Footer:
    """Verify all fields of header and footer; return the footer."""
    if object_size < HEADER_BYTES + FOOTER_BYTES or len(header) < HEADER_BYTES or len(tail) < FOOTER_BYTES:
        _corrupt(key, f"{object_size} bytes are too few for a segment object")
    header = bytes(header[:HEADER_BYTES])
    _check_header(header, key)
    footer = bytes(tail[-FOOTER_BYTES:])
    fields, seal = footer[: _FOOTER_FIELDS.size], footer[_FOOTER_FIELDS.size :]
    footer_checksum, magic = _FOOTER_SEAL.unpack(seal)
    if magic != _FOOTER_MAGIC:
        _corrupt(key, "it does not end with a footer, so it was cut, extended or overwritten")
    if footer_checksum != checksum64(header + fields):
        _corrupt(key, "the checksum of header and footer does not match")
    offset, stated_size, index_checksum, index_size, segment_count, version, flags, reserved = _FOOTER_FIELDS.unpack(
        fields
    )
    if (version, flags, reserved) != (FORMAT_VERSION, _FLAGS, _RESERVED):
        _corrupt(key, "version, flags or reserved bytes of the footer are not those of the header")
    if stated_size != object_size:
        _corrupt(key, f"it has {object_size} bytes where its footer states {stated_size}")
    if offset < HEADER_BYTES or offset + index_size + FOOTER_BYTES != object_size or index_size > INDEX_BYTES_MAX:
        _corrupt(key, "the index is not between segments and footer")
    return _Footer(offset, stated_size, index_checksum, index_size, segment_count)


def _check_header(header: bytes, key: str) -> None:
    magic, version, flags, reserved = _HEADER.unpack(header)
    if magic != _HEADER_MAGIC:
        _corrupt(key, "it does not begin like a segment object")
    if version > FORMAT_VERSION:
        _corrupt(
            key,
            f"its format version {version} is newer than {FORMAT_VERSION}, the newest that this program reads",
        )
    if version != FORMAT_VERSION:
        _corrupt(key, f"its format version {version} never existed")
    if (flags, reserved) != (_FLAGS, _RESERVED):
        _corrupt(key, "flags or reserved bytes of the header are not zero")


def _parse_index(index: bytes, key: str) -> list[SegmentEntry]:
    try:
        rows = json.loads(index)
        if not isinstance(rows, list):
            _corrupt(key, "the index is not a list")
        return [SegmentEntry.from_dict(row) for row in rows]
    except InvalidInputError as error:
        raise CorruptDataError(f"object {key} is damaged: the index has a bad entry: {error}", key=key) from error
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"object {key} is damaged: the index is not JSON", key=key) from error


def _check_index(entries: list[SegmentEntry], footer: _Footer, key: str) -> None:
    if len(entries) != footer.segment_count:
        _corrupt(key, f"the index has {len(entries)} entries where the footer states {footer.segment_count}")
    if not 1 <= len(entries) <= SEGMENTS_MAX:
        _corrupt(key, f"the index has {len(entries)} entries")
    offset = HEADER_BYTES
    for entry in entries:
        if entry.offset_bytes != offset:
            _corrupt(key, f"a segment begins at {entry.offset_bytes} where the one before ends at {offset}")
        offset = entry.end_bytes
    if offset != footer.index_offset:
        _corrupt(key, f"the last segment ends at {offset} where the index begins at {footer.index_offset}")
    if len({entry.id for entry in entries}) != len(entries):
        _corrupt(key, "a change set occurs twice")


def _corrupt(key: str, defect: str, **context: int) -> NoReturn:
    raise CorruptDataError(f"object {key} is damaged: {defect}", key=key, **context)
