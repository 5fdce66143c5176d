"""
Framing of a stream: each frame is a JSON header and a binary payload. `restore` defines the headers.

No I/O except reading from a given stream.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, Protocol

from storage.checksum import BytesLike
from storage.errors import CorruptDataError

FRAME_HEADER_BYTES_MAX = 1 << 20
_FRAME = struct.Struct(">I")


class FrameStream(Protocol):
    """A source of frames."""

    def read(self, size: int, /) -> bytes:
        """Return this many bytes, or fewer at the end."""


def encode_frame(header: dict[str, Any], payload: BytesLike = b"") -> list[BytesLike]:
    """Return one frame of a restore stream: 4-byte header length, JSON header with the payload's `size`, payload."""
    head = json.dumps({**header, "size": len(payload)}, separators=(",", ":")).encode()
    return [_FRAME.pack(len(head)), head, payload]


def decode_frames(stream: FrameStream) -> Iterator[tuple[dict[str, Any], bytes]]:
    """
    Yield (header, payload) up to the frame whose kind is ``end``.

    Raises:
        CorruptDataError: The stream ends early or is not a frame stream. An ``error`` frame is yielded like any other;
            the caller raises its error.
    """
    while True:
        (size,) = _FRAME.unpack(_read_exactly(stream, _FRAME.size))
        if size > FRAME_HEADER_BYTES_MAX:
            raise CorruptDataError(f"a restore frame claims a header of {size} bytes")
        header = _frame_header(_read_exactly(stream, size))
        payload = _read_exactly(stream, header["size"])
        yield header, payload
        if header["kind"] == "end":
            return


def _frame_header(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except ValueError as error:
        raise CorruptDataError(f"a restore frame's header is not JSON: {error}") from error
    if not isinstance(header, dict) or type(header.get("size")) is not int or not isinstance(header.get("kind"), str):
        raise CorruptDataError(f"a restore frame's header has no size or no kind: {data[:100]!r}")
    if header["size"] < 0:
        raise CorruptDataError(f"a restore frame claims a payload of {header['size']} bytes")
    return header


def _read_exactly(stream: FrameStream, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise CorruptDataError(f"the restore stream ended early: {len(data)} of {size} bytes")
    return data
