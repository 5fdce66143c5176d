"""Frames of a link: the length in four bytes, big-endian, then one JSON object. No I/O."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from dstl_service.wire import JSON_VALUES_MAX, VALUE_BYTES

HELLO_BYTES_MAX = 8 << 10
"""Largest frame of a connection that has not shown the job's token."""
FRAME_BYTES_MAX = 64 << 20
"""Largest frame after that: the handles of a checkpoint with 100,000 change sets."""
_LENGTH_BYTES = 4
_BEFORE_VALUES = (b",", b"[", b"{")

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
        cost_bytes: Approximate memory of the newest message.
    """

    def __init__(self, bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.cost_bytes = 0
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that were fed and not decoded yet."""
        return len(self._buffer)

    @property
    def complete_bytes(self) -> int:
        """Size of the next frame if all of it was fed, else 0."""
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        return size if len(self._buffer) >= _LENGTH_BYTES + size else 0

    def feed(self, piece: bytes) -> None:
        """Add the next bytes of the stream."""
        self._buffer += piece

    def next(self) -> Message | None:
        """
        Return the next complete message, or None if more bytes are needed.

        Raises:
            FrameError: The frame is larger than `bytes_max`, has more values than a body of a request may have, or is
                not a JSON object.
        """
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if size > self.bytes_max:
            raise FrameError(f"a frame of {size} bytes, more than {self.bytes_max}")
        end = _LENGTH_BYTES + size
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as buffer:
            data = bytes(buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        values = sum(map(data.count, _BEFORE_VALUES))
        if values > JSON_VALUES_MAX:  # the event loop waits while they are parsed
            raise FrameError(f"a frame of {values} values, more than {JSON_VALUES_MAX}")
        self.cost_bytes = size + values * VALUE_BYTES
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise FrameError("a frame that is not JSON") from error
        if not isinstance(message, dict):
            raise FrameError("a frame that is not a JSON object")
        return message
