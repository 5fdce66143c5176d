"""The memory of recent segments."""

from __future__ import annotations

from dataclasses import replace

from dstl_service.restore.segment_cache import PLACE_BYTES, SegmentCache
from storage.model import SegmentHandle
from tests.unit.dstl_service.samples import handles_of, segment

HANDLES = handles_of([segment(sqn) for sqn in range(4)])


def cache_of(payloads: int, size_bytes: int) -> SegmentCache:
    """Return a cache with room for this many payloads of a size."""
    return SegmentCache(payloads * (size_bytes + PLACE_BYTES))


def test_kept_payload_is_given_back() -> None:
    """A payload is found by its own handle only."""
    cache = cache_of(2, 4)
    cache.put(HANDLES[0], b"zero")

    assert cache.get(HANDLES[0]) == b"zero"
    assert cache.get(HANDLES[1]) is None
    assert (cache.hits, cache.misses) == (1, 1)


def test_same_place_in_other_object_is_other() -> None:
    """The object's key is part of a payload's position."""
    cache = cache_of(2, 4)
    cache.put(HANDLES[0], b"zero")

    assert cache.get(handles_of([segment(0)], "job/segments/other/9.seg")[0]) is None


def test_least_recently_used_goes_first() -> None:
    """I16: above the limit, the least recently used payload is evicted."""
    cache = cache_of(3, 10)
    for handle in HANDLES[:3]:
        cache.put(handle, b"x" * 10)
    cache.get(HANDLES[0])
    cache.put(HANDLES[3], b"y" * 10)

    assert [cache.get(handle) is not None for handle in HANDLES] == [True, False, True, True]


def test_several_are_given_together_or_not_at_all() -> None:
    """I16: what is given together counts as used; if one is missing, nothing is given or counted."""
    cache = cache_of(3, 10)
    for handle in HANDLES[:3]:
        cache.put(handle, b"x" * 10)

    assert cache.get_all(HANDLES) is None
    assert (cache.hits, cache.misses) == (0, 0)
    assert cache.get_all(HANDLES[:2]) == [b"x" * 10] * 2
    assert cache.hits == 2
    cache.put(HANDLES[3], b"y" * 10)
    assert [cache.peek(handle) is not None for handle in HANDLES] == [True, True, False, True]


def test_oversized_payload_drops_nothing() -> None:
    """A payload larger than the whole cache is not kept, and the others stay."""
    cache = cache_of(1, 10)
    cache.put(HANDLES[0], b"x" * 10)
    cache.put(HANDLES[1], b"x" * 11)

    assert cache.get(HANDLES[0]) is not None
    assert cache.get(HANDLES[1]) is None


def test_replaced_payload_is_counted_once() -> None:
    """I9: putting the same payload again takes no additional space."""
    cache = cache_of(2, 10)
    for _ in range(5):
        cache.put(HANDLES[0], b"x" * 10)
    cache.put(HANDLES[1], b"x" * 10)

    assert cache.get(HANDLES[0]) is not None
    assert cache.get(HANDLES[1]) is not None


def test_cache_of_no_bytes_keeps_nothing() -> None:
    """I16: a cache can be disabled."""
    cache = SegmentCache(0)
    cache.put(HANDLES[0], b"x")

    assert cache.get(HANDLES[0]) is None


def of_job(job: str, number: int) -> SegmentHandle:
    """Return a handle of a job."""
    handle = handles_of([segment(number)], f"{job}/segments/host/{number}.seg")[0]
    return replace(handle, entry=replace(handle.entry, id=replace(handle.entry.id, job=job)))


def test_job_drives_out_only_its_own() -> None:
    """When the memory is full, a busy job loses its own payloads; those of a quiet job stay."""
    cache = cache_of(10, 10)
    quiet = [of_job("quiet", number) for number in range(3)]
    for handle in quiet:
        cache.put(handle, b"x" * 10)
    for number in range(50):
        cache.put(of_job("busy", number), b"y" * 10)

    assert all(cache.get(handle) is not None for handle in quiet)
    assert sum(cache.get(of_job("busy", number)) is not None for number in range(50)) == 7
    assert cache.bytes_kept == 10 * (10 + PLACE_BYTES)


def test_jobs_share_memory_evenly() -> None:
    """Two busy jobs keep half of the memory each, whichever came first."""
    cache = cache_of(10, 10)
    for job in ("first", "second"):
        for number in range(50):
            cache.put(of_job(job, number), b"y" * 10)

    kept = [sum(cache.get(of_job(job, number)) is not None for number in range(50)) for job in ("first", "second")]
    assert kept == [5, 5]


def test_empty_payloads_take_memory_too() -> None:
    """C23: payloads without bytes, of which a job may have any number, drive each other out."""
    cache = cache_of(3, 0)
    for handle in HANDLES:
        cache.put(handle, b"")

    assert [cache.get(handle) is not None for handle in HANDLES] == [False, True, True, True]
    assert cache.bytes_kept == 3 * PLACE_BYTES
