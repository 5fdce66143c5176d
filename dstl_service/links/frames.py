"""Frames of a link: the length in four bytes, big-endian, then one JSON object. No I/O."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

HELLO_BYTES_MAX = 8 << 10
"""Largest frame of a connection that has not shown the job's token."""
FRAME_BYTES_MAX = 64 << 20
"""Largest frame after that: the handles of a checkpoint with 100,000 change sets."""
_LENGTH_BYTES = 4

Message: TypeAlias = dict[str, Any]


class FrameError(Exception):
    """The other side sent something other than frames within the limit; the connection is of no use."""


def encode_frame(message: Message) -> bytes:
    """Return the frame of a message."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class FrameDecoder:
    """
    Decodes frames from pieces of a byte stream.

    Attributes:
        bytes_max: Largest accepted frame, without its length.
    """

    def __init__(self, bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> None:
        """Add the next bytes of the stream."""
        self._buffer += piece

    def next(self) -> Message | None:
        """
        Return the next complete message, or None if more bytes are needed.

        Raises:
            FrameError: The frame is larger than `bytes_max`, or not a JSON object.
        """
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if size > self.bytes_max:
            raise FrameError(f"a frame of {size} bytes, more than {self.bytes_max}")
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        data = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FrameError("a frame that is not JSON") from error
        if not isinstance(message, dict):
            raise FrameError("a frame that is not a JSON object")
        return message
