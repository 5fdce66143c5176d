"""Segments for several tests of this package."""

from __future__ import annotations

from collections.abc import Sequence

from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, Segment, SegmentEntry, SegmentHandle, Writer
from storage.object_store import ObjectStore
from storage.segment_format import encode_object


def segment(partition: int, payload: bytes, sqn: int = 0) -> Segment:
    """Return a segment of a partition that owns the key groups 4p..4p+3."""
    change_set_id = ChangeSetId("job", "op", 7, Writer(3, 100 + partition), partition, sqn)
    return Segment.of(change_set_id, KeyGroupRange(4 * partition, 4 * partition + 3), 1, payload)


def encoded(*payloads: bytes) -> tuple[bytes, list[SegmentEntry]]:
    """Return the bytes of an object with these payloads, and its entries."""
    buffers, entries = encode_object([segment(number, payload) for number, payload in enumerate(payloads)])
    return b"".join(buffers), entries


def stored(store: ObjectStore, key: str, payloads: Sequence[bytes]) -> list[SegmentHandle]:
    """Store an object with these payloads, and return the handles of its segments."""
    data, entries = encoded(*payloads)
    store.put(key, data)
    return [SegmentHandle(key, len(data), entry) for entry in entries]
