"""Reading segments by handle: how much is read, and which errors are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from storage.errors import CorruptDataError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import SegmentEntry, SegmentHandle
from storage.segment_format import FOOTER_BYTES
from storage.segment_reader import TAIL_BYTES, read_index, read_payload, read_segments
from storage.testing import Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.storage.segments import stored

KEY = "segments/host/1.seg"
SMALL = [b"one", b"two", b"three"]
LARGE = [bytes([number]) * 400_000 for number in range(8)]


def read(store: MemoryStore | RecordingStore, handles: list[SegmentHandle]) -> list[bytes]:
    """Return the payloads in order of arrival."""
    found = list(read_segments(store, handles))
    assert [handle for handle, _ in found] == handles
    return [bytes(payload) for _, payload in found]


def test_small_object_is_read_whole() -> None:
    """One GET serves all handles of a small object, even if only one segment is requested."""
    store = RecordingStore(MemoryStore())
    handles = stored(store, KEY, SMALL)
    assert read(store, [handles[2]]) == [b"three"]
    assert (store.count("get"), store.count("get_range")) == (1, 0)


def test_order_of_handles_is_kept() -> None:
    """Segments are read in the requested order, over several objects, and each object is read once."""
    store = RecordingStore(MemoryStore())
    first, second = stored(store, "a.seg", SMALL), stored(store, "b.seg", [b"four", b"five"])
    wanted = [second[1], first[2], first[0], second[0], first[0]]
    assert read(store, wanted) == [b"five", b"three", b"one", b"four", b"one"]
    assert store.keys("get") == ["b.seg", "a.seg"]


def test_nothing_wanted_reads_nothing() -> None:
    """Without handles there is no request."""
    store = RecordingStore(MemoryStore())
    assert read(store, []) == []
    assert store.calls == ()


def test_few_segments_are_read_by_ranges() -> None:
    """Only header, tail and the requested segments are read, neighbours in one request."""
    store = RecordingStore(MemoryStore())
    handles = stored(store, KEY, LARGE)
    store.clear()
    assert read(store, [handles[3], handles[4]]) == LARGE[3:5]
    assert store.count("get") == 0
    assert [call.size_bytes for call in store.calls] == [16, 800_000, TAIL_BYTES]


def test_most_segments_are_read_whole() -> None:
    """From half of the bytes on, one GET replaces ranges."""
    store = RecordingStore(MemoryStore())
    handles = stored(store, KEY, LARGE)
    assert read(store, handles[1:6]) == LARGE[1:6]
    assert (store.count("get"), store.count("get_range")) == (1, 0)


def test_large_index_is_read_with_one_request_more() -> None:
    """An index that begins before the tail is read with one more request."""
    store = RecordingStore(MemoryStore())
    payloads = [bytes(2_000) for _ in range(1_000)]
    handles = stored(store, KEY, payloads)
    assert read(store, [handles[500]]) == [payloads[500]]
    assert store.count("get_range") == 4


def test_missing_object_is_corrupt() -> None:
    """I10: for a missing object that a checkpoint names, the error names the object."""
    store = MemoryStore()
    handles = stored(store, KEY, SMALL)
    store.delete([KEY])
    with pytest.raises(CorruptDataError, match=f"object {KEY} named by a checkpoint is missing"):
        read(store, handles)


@pytest.mark.parametrize("payloads", [SMALL, LARGE])
def test_flipped_bit_is_found(payloads: list[bytes]) -> None:
    """I10: a flipped bit in the bytes read is an error with the object's name, never a wrong value."""
    store = MemoryStore()
    handles = stored(store, KEY, payloads)
    good = store.get(KEY)
    places = [0, handles[1].entry.offset_bytes, handles[-1].entry.end_bytes, len(good) - FOOTER_BYTES, len(good) - 1]
    for place in places:
        store.put(KEY, good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptDataError, match=KEY):
            read(store, [handles[1]])


@pytest.mark.parametrize("payloads", [SMALL, LARGE])
def test_cut_object_is_found(payloads: list[bytes]) -> None:
    """I10: for a truncated tail, the error names the object."""
    store = MemoryStore()
    handles = stored(store, KEY, payloads)
    store.put(KEY, store.get(KEY)[:-1])
    with pytest.raises(CorruptDataError, match=KEY):
        read(store, [handles[0]])


@pytest.mark.parametrize("payloads", [SMALL, LARGE])
@pytest.mark.parametrize(
    "change",
    [
        lambda entry: dataclasses.replace(entry, checksum=entry.checksum ^ 1),
        lambda entry: dataclasses.replace(entry, offset_bytes=entry.offset_bytes + 1),
        lambda entry: dataclasses.replace(entry, size_bytes=entry.size_bytes - 1),
        lambda entry: dataclasses.replace(entry, count=9),
        lambda entry: dataclasses.replace(entry, id=dataclasses.replace(entry.id, sqn=9)),
    ],
)
def test_handle_that_differs_from_index_is_found(
    payloads: list[bytes], change: Callable[[SegmentEntry], SegmentEntry]
) -> None:
    """I10: a handle is accepted only if the object's own index agrees."""
    store = MemoryStore()
    handle = stored(store, KEY, payloads)[1]
    with pytest.raises(CorruptDataError, match=f"{KEY} does not contain the segment"):
        read(store, [dataclasses.replace(handle, entry=change(handle.entry))])


def test_handles_with_different_sizes_are_refused() -> None:
    """Handles of one object with different sizes are refused."""
    store = MemoryStore()
    handles = stored(store, KEY, SMALL)
    with pytest.raises(CorruptDataError, match="different sizes"):
        read(store, [handles[0], dataclasses.replace(handles[1], object_size_bytes=9_999)])


def test_unavailable_store_stays_unavailable() -> None:
    """A store that does not answer is not reported as damage: the read may be retried."""
    inner = MemoryStore()
    handles = stored(inner, KEY, SMALL)
    store = FaultyStore(inner, Fault("get", FaultKind.FAIL_BEFORE))
    with pytest.raises(UnavailableError):
        list(read_segments(store, handles))
    assert [bytes(payload) for _, payload in read_segments(store, handles)] == SMALL


@pytest.mark.parametrize("count", [1, 3, 2000])
def test_index_is_read_without_payloads(count: int) -> None:
    """I10: the index of an object without known handles is read from its ends, however long it is."""
    store = RecordingStore(MemoryStore())
    handles = stored(store, KEY, [b"x" * 200] * count)

    assert read_index(store, KEY, handles[0].object_size_bytes) == [handle.entry for handle in handles]
    assert store.count("get_range") <= 3
    assert read_payload(store, handles[-1]) == b"x" * 200


@pytest.mark.parametrize("position", [0, 20, -1, -60, -100])
def test_damaged_index_is_reported(position: int) -> None:
    """I10: damage of header, index and footer is found with the index, damage of a payload when it is read."""
    store = MemoryStore()
    (handle,) = stored(store, KEY, [b"x" * 200])
    data = bytearray(store.get(KEY))
    data[position] ^= 1
    store.put(KEY, bytes(data))

    with pytest.raises(CorruptDataError, match=KEY):
        assert read_index(store, KEY, len(data)) == [handle.entry]
        read_payload(store, handle)
    with pytest.raises(CorruptDataError, match="too few"):
        read_index(store, KEY, 3)
