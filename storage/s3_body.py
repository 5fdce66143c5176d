"""
The body of a PUT in several buffers, read without copying them.

An upload's attempts may overlap and hang, and a copy for each would be memory outside all limits. No I/O.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

PIECE_BYTES = 2**20


class BufferedBody:
    """
    Several buffers as a file, as far as boto3 uses one.

    Unlike a file's, `read` returns up to PIECE_BYTES even if less is requested: urllib3 requests 16 KB at a time and
    sends whatever it gets, and each of its sends would wait for the interpreter's lock again.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._starts = [0, *accumulate(len(buffer) for buffer in self._buffers)]
        self._position = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, size: int = -1) -> bytes | memoryview:
        """Return bytes from the position: the rest of one buffer, but at most the larger of `size` and PIECE_BYTES."""
        if self._position >= len(self):
            return b""
        if size < 0:
            rest = b"".join(self._buffers)[self._position :]
            self._position = len(self)
            return rest
        number = bisect_right(self._starts, self._position) - 1
        offset = self._position - self._starts[number]
        piece = self._buffers[number][offset : offset + max(size, PIECE_BYTES)]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; boto3 does so before it resends a body."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self)}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position."""
        return self._position
