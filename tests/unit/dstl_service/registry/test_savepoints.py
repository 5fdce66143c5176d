"""
Savepoints that are made while the objects they name are being deleted.

A failure means that a savepoint is reported as made and cannot be restored.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS
from dstl_service.collection.retention import RetentionSettings
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.formats.manifest import ManifestKind, encode_manifest, object_keys
from dstl_service.registry.job_store import JobStore
from storage.change_set import encode_change_set
from storage.errors import CorruptDataError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.interleaving import PausingStore
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import SteppingStore, opened
from tests.waiting import wait_until

MANIFESTS = "job/checkpoints/*"
SAVEPOINTS = "job/savepoints/*"


def subsumed_history(store: SteppingStore) -> JobHistory:
    """Return a job whose first checkpoint is subsumed, old enough to be collected, and still stored."""
    history = JobHistory(store)
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    history.compact(history.object(1))
    history.clock.advance(store.head("job/job.json").modified_ms + 100 * ORPHAN_AGE_MIN_MS)
    return history


def stored_keys(store: SteppingStore) -> set[str]:
    """Return the keys of all objects of the job."""
    return {info.key for info in store.list("job/")}


def test_savepoint_made_during_collection_keeps_its_objects() -> None:
    """I11: a collector that read the savepoints long ago reads them again before it deletes objects."""
    store = SteppingStore()
    history = subsumed_history(store)
    maker = opened(store, host=2)
    store.before_delete(MANIFESTS, lambda: maker.make_savepoint("kept", 0))

    report = history.collect(checkpoints_max=1)

    assert report.subsumed == 1
    assert object_keys(maker.savepoints.load("kept")) <= stored_keys(store)
    assert report.orphans == []


def test_savepoint_of_deleted_manifest_is_none() -> None:
    """I11: if the manifest is gone its objects may follow, so no savepoint is made although all objects exist."""
    store = SteppingStore()
    subsumed_history(store)
    maker = opened(store, host=2)
    ref = next(maker.completed()).ref
    store.before_put(SAVEPOINTS, lambda: opened(store, host=3).delete_manifests([ref]))

    with pytest.raises(NotFoundError, match="subsumed"):
        maker.make_savepoint("late", 0)

    assert maker.savepoints.names() == []


def test_savepoint_made_during_retention_keeps_its_objects() -> None:
    """I11: a coordinator that deletes subsumed objects spares those of a savepoint that was made meanwhile."""
    store = SteppingStore()
    maker = opened(store, host=2)
    store.before_delete(MANIFESTS, lambda: maker.make_savepoint("kept", 0))
    compaction = CompactionSettings(floor_bytes=1, log_ratio_max=0.1)
    with service(store, compaction=compaction, retention=RetentionSettings(checkpoints_max=1, delay_s=0)) as life:
        life.open()
        base = None

        def checkpoint() -> bool:
            nonlocal base
            number = base["id"] + 1 if base else 0
            ref = life.append(encode_change_set({bytes([0, 1]): b"%d" % number}), checkpoint_id=number)
            base = life.complete(number, base, ref)
            return "dstl_subsumed_objects_deleted_total{" in life.client.get("/metrics").text

        wait_until(checkpoint)

    assert object_keys(maker.savepoints.load("kept")) <= stored_keys(store)


def left_behind(history: JobHistory, job_store: JobStore) -> None:
    """Leave a savepoint of a checkpoint without its snapshot, as a process that dies before its last check does."""
    lost = MaterializationHandle("op", KeyGroupRange(0, 0), 0, "uid", "job/materialized/op/lost.json", 1)
    found = replace(next(job_store.completed()), materializations=(lost,), kept_by="dead")
    history.store.put("job/savepoints/broken.json", encode_manifest(replace(found, kind=ManifestKind.COMPLETE)))


def test_savepoint_left_behind_does_not_end_collections(caplog: pytest.LogCaptureFixture) -> None:
    """I12: a savepoint whose snapshot is gone keeps its other objects, is reported, and stops nothing else."""
    history = JobHistory()
    kept = history.object(0)
    history.complete(kept, kind=ManifestKind.COMPLETE)
    left_behind(history, history.jobs)
    history.compact(history.object(1))
    orphan = history.object(0)
    history.clock.advance(10 * ORPHAN_AGE_MIN_MS)

    history.collect(checkpoints_max=1)
    report = history.collect(checkpoints_max=1)

    assert orphan.object_key not in history.stored()
    assert kept.object_key in history.stored()
    assert report.orphans == []
    assert "cannot be restored" in caplog.text


def test_savepoint_that_cannot_be_read_ends_the_collection() -> None:
    """I11: the objects of a damaged savepoint are unknown, so nothing is deleted."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    orphan = history.object(0)
    history.clock.advance(10 * ORPHAN_AGE_MIN_MS)
    history.store.put("job/savepoints/damaged.json", b"{")

    with pytest.raises(CorruptDataError):
        history.collect()
    assert orphan.object_key in history.stored()


def test_savepoint_is_restored_beside_a_damaged_one() -> None:
    """I10: a damaged savepoint is an error for its own checkpoint, not for that of another savepoint."""
    store = SteppingStore()
    history = subsumed_history(store)
    first = next(history.jobs.completed())
    kept = history.jobs.make_savepoint("kept", first.id)
    history.jobs.delete_manifests([first.ref])
    store.put("job/savepoints/damaged.json", b"{")
    jobs = opened(store, host=2)

    assert object_keys(next(jobs.chain(first.ref))) == object_keys(kept)
    with pytest.raises(CorruptDataError, match="damaged"):
        next(jobs.chain(replace(first.ref, uid="other")))


def test_savepoint_that_another_call_relies_on_stays() -> None:
    """A call that finds its checkpoint gone deletes no savepoint that another call has found to be whole."""
    store = SteppingStore()
    history = subsumed_history(store)
    inner, found = opened(store, host=3), next(history.jobs.completed())
    paused = PausingStore(store)

    def others() -> None:
        inner.keep("kept", found)
        inner.delete_manifests([found.ref])

    paused.pause_at("get", MANIFESTS, others)
    with pytest.raises(NotFoundError):
        opened(paused, host=2).keep("kept", found)

    assert inner.savepoints.load("kept").ref == found.ref
