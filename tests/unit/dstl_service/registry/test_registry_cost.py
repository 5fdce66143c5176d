"""
The cost of a job's registry, counted in requests to the store.

A failure means that a job becomes slower with each restart, or with each table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dstl_service.formats.manifest import Manifest
from dstl_service.registry import manifest_log
from dstl_service.registry.job_store import JobStore
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import MaterializationHandle, ObjectInfo
from storage.object_store import ObjectStore
from storage.testing import RecordingStore
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import manifest, opened

START_REQUESTS_MAX = 20
SAVEPOINT_REQUESTS_MAX = 50


def complete(job_store: JobStore, epoch: int, base: Manifest | None) -> Manifest:
    checkpoint_id = base.id + 1 if base else 0
    made, _ = job_store.create_manifest(
        manifest(checkpoint_id, epoch, base.ref if base else None, uid=f"e{epoch}", job_uid=job_store.job_uid)
    )
    return made


def start(store: ObjectStore, host: int) -> Manifest:
    """Do what a driver does at its start and for its first checkpoint, in a new process."""
    jobs = opened(store, host)
    epoch, latest = jobs.claim("driver")
    return complete(jobs, epoch, latest)


def restarted(times: int, every: int) -> MemoryStore:
    """Return a job that was taken over many times, with a checkpoint after every few takeovers."""
    store = MemoryStore()
    jobs = opened(store)
    for number in range(times):
        epoch, latest = jobs.claim("driver")
        if number % every == 0:
            complete(jobs, epoch, latest)
    return store


@pytest.mark.parametrize("every", [1, 100_000])
def test_start_after_a_thousand_restarts(every: int) -> None:
    """A start costs at most 20 requests, wherever the fences of earlier starts are."""
    store = RecordingStore(restarted(1000, every))

    start(store, host=1)

    assert len(store.calls) <= START_REQUESTS_MAX


def test_start_costs_the_same_however_many_there_were() -> None:
    """The number of listed keys does not grow either."""
    found = []
    for times in (30, 300):
        store = CountingStore(restarted(times, 5))
        start(store, host=1)
        found.append((store.listed, len(store.calls)))

    assert found[0] == found[1]


def test_sidecar_that_comes_between_claim_and_checkpoint() -> None:
    """A process that did not claim the job itself does not read the fences before its driver's."""
    inner = restarted(300, 100_000)
    epoch, latest = opened(inner, host=1).claim("driver")
    store = RecordingStore(inner)

    complete(opened(store, host=2), epoch, latest)

    assert len(store.calls) < START_REQUESTS_MAX


def test_collection_reads_no_fences() -> None:
    """Garbage is collected without reading what hundreds of restarts left."""
    inner = MemoryStore()
    history = JobHistory(inner)
    for number in range(200):
        history.epoch, history.newest = history.jobs.claim("driver")
        if number % 50 == 0:
            history.compact(history.object(number)) if history.newest else history.complete(history.object(0))
    store = RecordingStore(inner)
    history.store, history.jobs = store, opened(store, host=3)

    history.collect()

    assert store.count("get", "job/checkpoints/*") < 12


def test_old_fences_are_passed_by() -> None:
    """Fences at ids that were subsumed long ago are read once, and by no later process again."""
    inner = MemoryStore()
    history = JobHistory(inner)
    for _ in range(100):
        history.epoch, history.newest = history.jobs.claim("driver")
        history.compact(history.object(0)) if history.newest else history.complete(history.object(0))
    history.clock.advance(10**15)
    history.collect(checkpoints_max=1)
    history.jobs.forget()
    history.collect(checkpoints_max=1)
    store = RecordingStore(inner)
    history.store, history.jobs = store, opened(store, host=3)

    history.collect(checkpoints_max=1)

    assert store.count("get", "job/checkpoints/*") < 8


def test_savepoint_of_a_thousand_tables() -> None:
    """A savepoint costs the same for any number of tables: it refers to its checkpoint's manifest."""
    store = RecordingStore(MemoryStore())
    history = JobHistory(store)
    tables = tuple(
        MaterializationHandle("op", KeyGroupRange(number, number), 0, "uid", f"job/materialized/op/{number}.json", 1)
        for number in range(1000)
    )
    history.complete(history.object(0), materializations=tables)
    jobs = opened(store, host=2)
    store.clear()

    jobs.make_savepoint("kept", None)

    assert len(store.calls) <= SAVEPOINT_REQUESTS_MAX
    assert len(jobs.savepoints.load("kept").materializations) == 1000


def test_tasks_that_start_together_read_a_manifest_once() -> None:
    """Sixteen concurrent requests of tasks for one manifest cost one request to the store."""
    gate = threading.Barrier(16)

    class GatedStore(RecordingStore):
        def get(self, key: str) -> bytes:
            if "checkpoints" in key:
                waiting.wait(60)
            return super().get(key)

    inner = MemoryStore()
    made = start(inner, host=1)
    store = GatedStore(inner)
    jobs = opened(store, host=2)
    waiting = threading.Event()

    def load() -> Manifest:
        gate.wait(60)
        return jobs.load(made.id, made.generation)

    with ThreadPoolExecutor(16) as threads:
        loads = [threads.submit(load) for _ in range(16)]
        threads_are_there = gate
        while threads_are_there.n_waiting:
            pass
        waiting.set()
        assert {loaded.result(60).ref for loaded in loads} == {made.ref}
    assert store.count("get", "job/checkpoints/*") == 1


def test_cached_manifests_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: a manifest may have megabytes, so only a few of that size are cached; the newest always is."""
    monkeypatch.setattr(manifest_log, "_BYTES_CACHED", 1)
    store = RecordingStore(MemoryStore())
    jobs = opened(store)
    epoch, latest = jobs.claim("driver")
    first = complete(jobs, epoch, latest)
    second = complete(jobs, epoch, first)
    jobs.load(second.id, second.generation)
    assert store.count("get", "job/checkpoints/*") == 0
    jobs.load(first.id, first.generation)
    assert store.count("get", "job/checkpoints/*") == 1


class CountingStore(RecordingStore):
    """Counts the keys that listings return."""

    listed = 0

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Count each key that is taken."""
        for info in super().list(prefix, start_after=start_after):
            self.listed += 1
            yield info
