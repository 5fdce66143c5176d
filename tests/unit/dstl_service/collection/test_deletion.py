"""
Deletions that are paused before any of their store calls while a job is rewound.

A failure means that a rewound job, or a savepoint, cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.deletion import delete_subsumed
from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, collect_garbage
from dstl_service.collection.retention import Deletion, RetentionSettings, RetentionTracker
from dstl_service.formats.keys import epoch_key
from dstl_service.formats.manifest import ManifestKind, object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.repair.rebuild import rebuild_registry
from storage.errors import FencedError, NotFoundError
from storage.object_store import exists
from storage.testing import FakeIds
from tests.unit.dstl_service.interleaving import PausingStore
from tests.unit.dstl_service.samples import opened
from tests.unit.dstl_service.world import World

Deleting = Callable[[World, PausingStore], object]


def subsumed_world() -> tuple[World, list[Deletion], RetentionTracker]:
    """Return a job whose first three checkpoints were subsumed long ago and are about to be deleted."""
    world = World()
    world.complete(world.object(0), kind=ManifestKind.COMPLETE)
    world.complete(world.object(1))
    world.complete(world.object(2))
    assert world.newest is not None
    book = RetentionTracker(RetentionSettings(checkpoints_max=1, delay_s=0))
    book.begin(world.jobs.chain(world.newest.ref))
    world.compact(world.object(3))
    book.completed(world.newest, now_ms=0)
    world.clock.advance(10 * ORPHAN_AGE_MIN_MS)
    return world, book.take_due(0), book


def retention(world: World, due: list[Deletion], book: RetentionTracker) -> Deleting:
    return lambda _, store: delete_subsumed(store, opened(store, 5), due, book.spared, world.epoch)


def collection(world: World, *_: object) -> Deleting:
    return lambda _, store: collect_garbage(store, opened(store, 5), "job", world.clock, checkpoints_max=1)


def to_checkpoint(job_store: JobStore) -> None:
    """Rewind the job to a checkpoint with a setting that retains more of them."""
    with suppress(NotFoundError):  # its deletion has begun
        rewind(job_store, "job", FakeIds(8), checkpoint_id=1, write=True)


def to_savepoint(job_store: JobStore) -> None:
    """Rewind the job to a savepoint, and delete the savepoint."""
    rewind(job_store, "job", FakeIds(8), savepoint="kept", write=True)
    job_store.savepoints.delete("kept")


def check_whole(job_store: JobStore, world: World) -> None:
    """Check that all objects of the newest checkpoint and of all savepoints exist."""
    newest = job_store.newest()
    assert newest is not None
    kept = {handle.object_key for handle in job_store.state(newest.ref).log}
    for _, savepoint in job_store.savepoints.all():
        kept |= object_keys(savepoint)
    assert [key for key in kept if not exists(world.store, key)] == []


@pytest.mark.parametrize("deleting", [retention, collection])
@pytest.mark.parametrize("setting_back", [to_checkpoint, to_savepoint])
def test_rewind_during_deletion(deleting: Callable[..., Deleting], setting_back: Callable[[JobStore], None]) -> None:
    """I11: whatever is being deleted, a rewind either reaches a whole target or reports that the target is gone."""
    call, calls = 0, 8
    while call < calls:
        world, due, book = subsumed_world()
        if setting_back is to_savepoint:
            world.jobs.make_savepoint("kept", 1)
        store = PausingStore(world.store)
        store.pause_before(call, lambda: setting_back(opened(world.store, 7)))  # noqa: B023 - called in this round
        with suppress(NotFoundError):  # a savepoint that it was about to read is gone; the deletion is retried later
            deleting(world, due, book)(world, store)

        check_whole(opened(world.store, 6), world)
        call, calls = call + 1, max(calls, store.calls)


def test_manifest_left_behind_goes_before_its_objects() -> None:
    """I11: a manifest left by an earlier process is deleted before its objects, so that no savepoint is made of it."""
    world, due, book = subsumed_world()
    left = due[0].manifests[0]
    due = [Deletion(0, due[0].manifests[1:], due[0].object_keys)]
    maker = opened(world.store, 2)
    found = maker.resolve(left)

    delete_subsumed(world.store, world.jobs, due, book.spared, world.epoch)

    with pytest.raises(NotFoundError, match="subsumed"):
        maker.keep("late", found)
    assert maker.savepoints.names() == []


def test_coordinator_that_was_replaced_deletes_nothing() -> None:
    """I11: a replaced coordinator deletes nothing; the decision is the new owner's."""
    world, due, book = subsumed_world()
    before = world.stored()
    opened(world.store, 2).claim("another")

    deleted = delete_subsumed(world.store, world.jobs, due, book.spared, world.epoch)

    assert (deleted.is_owner, deleted.objects, world.stored()) == (False, 0, before)


def test_coordinator_that_was_replaced_by_an_epoch_that_was_lost() -> None:
    """I4, I11: an owner is replaced although the epoch record after its own was lost and a rebuild left a gap."""
    world, due, book = subsumed_world()
    world.jobs.make_savepoint("kept", 1)
    to_savepoint(opened(world.store, 2))
    world.store.put(epoch_key("job", world.epoch + 1), b"damaged")
    assert rebuild_registry(world.store, "job", world.clock, FakeIds(3), write=True).moved
    before = world.stored()

    deleted = delete_subsumed(world.store, world.jobs, due, book.spared, world.epoch)

    assert (deleted.is_owner, deleted.objects, world.stored()) == (False, 0, before)
    check_whole(opened(world.store, 4), world)
    with pytest.raises(FencedError, match=f"taken over by epoch {world.epoch + 3}"):
        world.jobs.check_still_newest(world.epoch)
