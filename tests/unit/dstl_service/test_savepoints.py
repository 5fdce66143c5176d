"""
Savepoints that are made while what they name is being deleted.

A failure means that a savepoint is reported as made and cannot be restored.
"""

from __future__ import annotations

import pytest

from dstl_service.garbage_collector import ORPHAN_AGE_MIN_MS
from dstl_service.log_compaction import CompactionSettings
from dstl_service.manifest import ManifestKind
from dstl_service.retention import RetentionSettings, object_keys
from storage.change_set import encode_change_set
from storage.errors import NotFoundError
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.samples import SteppingStore, opened
from tests.unit.dstl_service.world import World
from tests.waiting import wait_until

MANIFESTS = "job/checkpoints/*"
SAVEPOINTS = "job/savepoints/*"


def subsumed_world(store: SteppingStore) -> World:
    """Return a job whose first checkpoint is subsumed, old enough to be collected, and still there."""
    world = World(store)
    world.complete(world.object(0), kind=ManifestKind.COMPLETE)
    world.compact(world.object(1))
    world.clock.advance(store.head("job/job.json").modified_ms + 100 * ORPHAN_AGE_MIN_MS)
    return world


def stored_keys(store: SteppingStore) -> set[str]:
    """Return the keys of all objects of the job."""
    return {info.key for info in store.list("job/")}


def test_savepoint_made_during_collection_keeps_its_objects() -> None:
    """I11: a collector that looked at the savepoints long ago looks again before it deletes objects."""
    store = SteppingStore()
    world = subsumed_world(store)
    maker = opened(store, host=2)
    store.before_delete(MANIFESTS, lambda: maker.make_savepoint("kept", 0))

    report = world.collect(checkpoints_max=1)

    assert report.subsumed == 1
    assert object_keys(maker.savepoints.load("kept")) <= stored_keys(store)
    assert report.orphans == []


def test_savepoint_of_deleted_manifest_is_none() -> None:
    """I11: where the manifest is gone its objects may follow, so no savepoint is made although they are all there."""
    store = SteppingStore()
    subsumed_world(store)
    maker = opened(store, host=2)
    ref = next(maker.completed()).ref
    store.before_put(SAVEPOINTS, lambda: opened(store, host=3).delete_manifests([ref]))

    with pytest.raises(NotFoundError, match="subsumed"):
        maker.make_savepoint("late", 0)

    assert maker.savepoints.names() == []


def test_savepoint_made_during_retention_keeps_its_objects() -> None:
    """I11: a coordinator that deletes what was subsumed spares what a savepoint names that was made meanwhile."""
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
