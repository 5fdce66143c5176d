"""
Reads segments by their handles, and verifies everything that it reads (I10).

An object is read whole if it is small or most of it is wanted; otherwise its header, its index and the wanted segments
are read by ranges, neighbours in one request.
A ranged read does not detect bytes after the stated end of an object; they belong to no segment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from storage.errors import CorruptDataError, NotFoundError
from storage.model import SegmentEntry, SegmentHandle
from storage.object_store import ObjectReader
from storage.segment_format import FOOTER_BYTES, HEADER_BYTES, decode_index, decode_object, index_offset, verify_payload

WHOLE_OBJECT_BYTES_MAX = 2**20
"""An object up to this size is always read whole: one request costs more than the bytes."""

WHOLE_OBJECT_SHARE_MIN = 0.5
"""An object is read whole if the wanted segments are at least this share of its bytes."""

TAIL_BYTES = 2**16
"""Size of the first read at an object's end, which usually contains the whole index: about 300 entries."""

GAP_BYTES_MAX = 2**16
"""Ranges with a gap up to this between them are read as one."""

_Payloads = dict[SegmentEntry, memoryview]


def read_segments(store: ObjectReader, handles: Sequence[SegmentHandle]) -> Iterator[tuple[SegmentHandle, memoryview]]:
    """
    Read segments of any number of objects.

    Args:
        store: The store of the objects.
        handles: The segments to read, in any order. Each object is read once, and held in memory from its first handle
            to its last, so handles grouped by object need the least memory.

    Yields:
        Each handle, in the order given, with its payload: read-only, of `entry.size_bytes` bytes, verified.

    Raises:
        CorruptDataError: An object is missing, damaged, or does not contain its handle's segment. Never retry; alert.
        UnavailableError: The store does not answer. Everything yielded before is valid.
    """
    handles_of: defaultdict[str, list[SegmentHandle]] = defaultdict(list)
    for handle in handles:
        handles_of[handle.object_key].append(handle)
    remaining = Counter(handle.object_key for handle in handles)
    payloads_of: dict[str, _Payloads] = {}
    for handle in handles:
        key = handle.object_key
        if key not in payloads_of:
            payloads_of[key] = _read_object(store, handles_of[key])
        yield handle, payloads_of[key][handle.entry]
        remaining[key] -= 1
        if not remaining[key]:
            del payloads_of[key]


def bytes_to_read(handles: Iterable[SegmentHandle]) -> int:
    """Return how many bytes `read_segments` reads and holds for handles, gaps between ranges not counted."""
    wanted: Counter[tuple[str, int]] = Counter()
    for handle in handles:
        wanted[handle.object_key, handle.object_size_bytes] += handle.entry.size_bytes
    return sum(size if _is_read_whole(size, part) else part for (_, size), part in wanted.items())


def read_index(store: ObjectReader, key: str, object_size: int) -> list[SegmentEntry]:
    """
    Read the index of an object, for callers without handles; payloads are not checked.

    Raises:
        NotFoundError: The object does not exist.
        CorruptDataError: It is not a segment object of this size, or its header, index or footer is damaged.
    """
    if object_size < HEADER_BYTES + FOOTER_BYTES:
        raise CorruptDataError(f"object {key} is damaged: {object_size} bytes are too few for it", key=key)
    tail_begin = max(0, object_size - TAIL_BYTES)
    header = memoryview(store.get_range(key, 0, HEADER_BYTES if tail_begin else object_size))
    tail = memoryview(store.get_range(key, tail_begin, object_size - tail_begin)) if tail_begin else header
    index_begin = index_offset(header, tail, object_size, key)
    if index_begin < tail_begin:
        tail = memoryview(store.get_range(key, index_begin, object_size - index_begin))
    return decode_index(header, tail, object_size, key)


def read_payload(store: ObjectReader, handle: SegmentHandle) -> bytes:
    """
    Read the payload of one segment whose entry comes from a verified index; other segments may be damaged.

    Raises:
        NotFoundError: The object does not exist.
        CorruptDataError: The payload is damaged.
    """
    entry = handle.entry
    payload = store.get_range(handle.object_key, entry.offset_bytes, entry.size_bytes)
    verify_payload(entry, payload, handle.object_key)
    return payload


def _read_object(store: ObjectReader, handles: Sequence[SegmentHandle]) -> _Payloads:
    """Read the segments of the handles, all of one object."""
    key, object_size = handles[0].object_key, handles[0].object_size_bytes
    if any(handle.object_size_bytes != object_size for handle in handles):
        raise CorruptDataError(f"handles state different sizes of object {key}", key=key)
    wanted = {handle.entry for handle in handles}
    wanted_bytes = sum(entry.size_bytes for entry in wanted)
    try:
        if _is_read_whole(object_size, wanted_bytes):
            return _read_whole(store, key, object_size, wanted)
        return _read_ranges(store, key, object_size, wanted)
    except NotFoundError as error:
        raise CorruptDataError(f"object {key} named by a checkpoint is missing", key=key, store=store.url) from error


def _is_read_whole(object_size: int, wanted_bytes: int) -> bool:
    return object_size <= WHOLE_OBJECT_BYTES_MAX or wanted_bytes >= WHOLE_OBJECT_SHARE_MIN * object_size


def _read_whole(store: ObjectReader, key: str, object_size: int, wanted: set[SegmentEntry]) -> _Payloads:
    data = store.get(key)
    if len(data) != object_size:
        raise CorruptDataError(f"object {key} has {len(data)} bytes where its handle states {object_size}", key=key)
    payloads = dict(decode_object(data, key))
    _check_wanted(wanted, payloads.keys(), key)
    return {entry: payloads[entry] for entry in wanted}


def _read_ranges(store: ObjectReader, key: str, object_size: int, wanted: set[SegmentEntry]) -> _Payloads:
    tail_begin = object_size - TAIL_BYTES
    spans = [(0, HEADER_BYTES), (tail_begin, object_size), *((entry.offset_bytes, entry.end_bytes) for entry in wanted)]
    chunks = [(begin, memoryview(store.get_range(key, begin, end - begin))) for begin, end in _merge(spans)]
    header, tail = _cut(chunks, 0, HEADER_BYTES), _cut(chunks, tail_begin, object_size)
    index_begin = index_offset(header, tail, object_size, key)
    if index_begin < tail_begin:
        tail = memoryview(store.get_range(key, index_begin, object_size - index_begin))
    _check_wanted(wanted, set(decode_index(header, tail, object_size, key)), key)
    payloads = {entry: _cut(chunks, entry.offset_bytes, entry.end_bytes) for entry in wanted}
    for entry, payload in payloads.items():
        verify_payload(entry, payload, key)
    return payloads


def _check_wanted(wanted: set[SegmentEntry], stored: Collection[SegmentEntry], key: str) -> None:
    for entry in wanted:
        if entry not in stored:
            raise CorruptDataError(
                f"object {key} does not contain the segment of a handle", key=key, **entry.id.to_dict()
            )


def _merge(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge spans `(begin, end)` that overlap or have a gap of at most GAP_BYTES_MAX; the result ascends."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] <= GAP_BYTES_MAX:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _cut(chunks: Sequence[tuple[int, memoryview]], begin: int, end: int) -> memoryview:
    """Return the object's bytes from `begin` to `end`, from the chunk that contains them."""
    chunk_begin, chunk = next((start, data) for start, data in reversed(chunks) if start <= begin)
    return chunk[begin - chunk_begin : end - chunk_begin]
