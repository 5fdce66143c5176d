"""The reads of savepoints by deletions and listings: each object once, however often they look."""

from __future__ import annotations

import pytest

from dstl_service.registry import named_objects
from dstl_service.registry.job_store import JobStore
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, RecordingStore
from tests.unit.dstl_service.samples import handles_of, manifest, segment


def saved_job(store: RecordingStore, names: list[str]) -> JobStore:
    """Return a job whose only checkpoint has these savepoints."""
    job_store = JobStore(store, "job", FakeClock(), FakeIds())
    job_store.open(128)
    made = manifest(0, 1, None, job_uid=job_store.job_uid, segments=tuple(handles_of([segment(checkpoint_id=0)])))
    created, _ = job_store.create_manifest(made)
    for name in names:
        job_store.keep(name, created)
    store.clear()
    return job_store


def reads(store: RecordingStore) -> int:
    """Return how many savepoints were read since the last call."""
    count = store.count("get", "job/savepoints/*")
    store.clear()
    return count


def test_each_savepoint_is_read_once() -> None:
    """A job with many tables has megabytes per savepoint: all of them were read before each deletion."""
    store = RecordingStore(MemoryStore())
    job_store = saved_job(store, ["one", "other"])

    looks = [(job_store.savepoints.object_keys(), reads(store)) for _ in range(3)]
    named = job_store.savepoints.named(job_store.indexes)

    assert [count for _, count in looks] == [2, 0, 0]
    assert {frozenset(keys) for keys, _ in looks} == {frozenset(named)} == {frozenset({"job/segments/host/1.seg"})}
    assert reads(store) == 0


def test_deleted_savepoint_keeps_nothing() -> None:
    """The cached content of a savepoint is dropped with it, whichever process deleted it; a new one is read."""
    store = RecordingStore(MemoryStore())
    job_store = saved_job(store, ["one"])
    assert job_store.savepoints.object_keys()

    other = JobStore(store, "job", FakeClock(), FakeIds(1))
    other.open(None)
    other.savepoints.delete("one")
    assert job_store.savepoints.object_keys() == set()

    newest = other.newest()
    assert newest is not None
    other.keep("one", newest)
    assert job_store.savepoints.object_keys() == {"job/segments/host/1.seg"}


def test_memory_for_savepoints_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content without room in the cache is read again each time."""
    monkeypatch.setattr(named_objects, "_SAVED_KEYS_MAX", 1)
    store = RecordingStore(MemoryStore())
    job_store = saved_job(store, ["one", "other"])

    looks = [(job_store.savepoints.object_keys(), reads(store)) for _ in range(2)]

    assert [count for _, count in looks] == [2, 1]
    assert looks[0][0] == looks[1][0]


def test_listings_read_each_savepoint_once() -> None:
    """A reader's listings of a thousand tables' savepoints took seconds and gigabytes, again and again."""
    store = RecordingStore(MemoryStore())
    job_store = saved_job(store, ["one", "other"])

    looks = [([*job_store.savepoints.infos()], reads(store)) for _ in range(2)]
    found = job_store.savepoints.of(looks[0][0][0][1].checkpoint.ref)

    assert [count for _, count in looks] == [2, 0]
    assert looks[0][0] == looks[1][0]
    assert [name for name, _ in looks[0][0]] == ["one", "other"]
    assert found is not None
    assert found.segments
    assert reads(store) == 1


def test_memory_for_listings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Content without room in the cache is read again by each listing."""
    monkeypatch.setattr(named_objects, "_INFO_CHARS_MAX", 1)
    store = RecordingStore(MemoryStore())
    job_store = saved_job(store, ["one", "other"])

    looks = [([*job_store.savepoints.infos()], reads(store)) for _ in range(2)]

    assert [count for _, count in looks] == [2, 2]
    assert looks[0][0] == looks[1][0]
