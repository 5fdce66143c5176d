"""
Payloads of recent segments, kept in memory: the next batch's tables advance from here, not from the store.

Best effort and bounded (I16): least recently used payloads go first. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from storage.checksum import BytesLike
from storage.model import SegmentHandle


class SegmentCache:
    """Maps a handle's place to its verified payload; holds at most `bytes_max` bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._payloads: OrderedDict[tuple[str, int], BytesLike] = OrderedDict()
        self.hits = 0
        self.misses = 0

    def put(self, handle: SegmentHandle, payload: BytesLike) -> None:
        """Keep a payload; one larger than the whole cache is not kept."""
        if len(payload) > self._bytes_max:
            return
        key = (handle.object_key, handle.entry.offset_bytes)
        with self._lock:
            old = self._payloads.pop(key, None)
            self._bytes += len(payload) - (len(old) if old is not None else 0)
            self._payloads[key] = payload
            self._drop_to(self._bytes_max)

    def leave_room(self, bytes_taken: int) -> None:
        """Drop what does not fit beside bytes that others hold: together they stay below the cache's limit."""
        with self._lock:
            self._drop_to(self._bytes_max - bytes_taken)

    def _drop_to(self, bytes_max: int) -> None:
        while self._payloads and self._bytes > bytes_max:
            _, dropped = self._payloads.popitem(last=False)
            self._bytes -= len(dropped)

    def get(self, handle: SegmentHandle) -> BytesLike | None:
        """Return the payload, or None."""
        key = (handle.object_key, handle.entry.offset_bytes)
        with self._lock:
            payload = self._payloads.get(key)
            if payload is None:
                self.misses += 1
            else:
                self.hits += 1
                self._payloads.move_to_end(key)
            return payload
