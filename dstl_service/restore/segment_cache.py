"""
In-memory cache of recent segments' payloads: the next batch's tables advance from here, not from the store.

Best effort and bounded (I16): the job with the most bytes loses its least recently used payloads first, so that one
with much traffic does not evict all others. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.checksum import BytesLike
from storage.model import SegmentHandle

PLACE_BYTES = 512
"""What a payload takes beside its bytes, at most: its key, and its place among the others."""


@dataclass(slots=True)
class _Share:
    """Payloads of one job."""

    payloads: OrderedDict[tuple[str, int], BytesLike] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class SegmentCache:
    """Maps a handle's object key and offset to its verified payload; takes at most `bytes_max` bytes of memory."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._shares: dict[str, _Share] = {}
        self.bytes_kept = 0
        self.hits = 0
        self.misses = 0

    def put(self, handle: SegmentHandle, payload: BytesLike) -> None:
        """Cache a payload; one larger than the whole cache is ignored."""
        size_bytes = len(payload) + PLACE_BYTES
        if size_bytes > self._bytes_max:
            return
        key = (handle.object_key, handle.entry.offset_bytes)
        with self._lock:
            share = self._shares.setdefault(handle.entry.id.job, _Share())
            if (old := share.payloads.pop(key, None)) is not None:
                self._add(share, -len(old) - PLACE_BYTES)
            share.payloads[key] = payload
            self._add(share, size_bytes)
            self._drop_to(self._bytes_max)

    def leave_room(self, bytes_taken: int) -> None:
        """Evict payloads until the cache and `bytes_taken` together stay within the cache's limit."""
        with self._lock:
            self._drop_to(self._bytes_max - bytes_taken)

    def _drop_to(self, bytes_max: int) -> None:
        while self._shares and self.bytes_kept > bytes_max:
            job = max(self._shares, key=lambda name: self._shares[name].size_bytes)
            largest = self._shares[job]
            _, dropped = largest.payloads.popitem(last=False)
            self._add(largest, -len(dropped) - PLACE_BYTES)
            if not largest.payloads:
                del self._shares[job]

    def get(self, handle: SegmentHandle) -> BytesLike | None:
        """Return the payload, or None."""
        key = (handle.object_key, handle.entry.offset_bytes)
        with self._lock:
            share = self._shares.get(handle.entry.id.job)
            payload = share.payloads.get(key) if share is not None else None
            if share is None or payload is None:
                self.misses += 1
                return None
            self.hits += 1
            share.payloads.move_to_end(key)
            return payload

    def peek(self, handle: SegmentHandle) -> BytesLike | None:
        """Return the payload, or None, like `get`, without counting a hit or updating the order."""
        with self._lock:
            share = self._shares.get(handle.entry.id.job)
            return share.payloads.get((handle.object_key, handle.entry.offset_bytes)) if share is not None else None

    def get_all(self, handles: Sequence[SegmentHandle]) -> list[BytesLike] | None:
        """Return the payloads of all of these, or None if one is missing; it counts no hit then, and no miss."""
        found = []
        with self._lock:
            for handle in handles:
                share = self._shares.get(handle.entry.id.job)
                key = (handle.object_key, handle.entry.offset_bytes)
                if share is None or (payload := share.payloads.get(key)) is None:
                    return None
                share.payloads.move_to_end(key)
                found.append(payload)
            self.hits += len(found)
        return found

    def _add(self, share: _Share, size_bytes: int) -> None:
        share.size_bytes += size_bytes
        self.bytes_kept += size_bytes
