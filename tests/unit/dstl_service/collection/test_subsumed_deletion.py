"""
Deletions that are paused before any of their store calls while a job is rewound.

A failure means that a rewound job, or a savepoint, cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, collect_garbage
from dstl_service.collection.retention import Deletion, RetentionSettings, RetentionTracker
from dstl_service.collection.subsumed_deletion import delete_subsumed
from dstl_service.formats.keys import epoch_key
from dstl_service.formats.manifest import ManifestKind, object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.repair.rebuild import rebuild_registry
from storage.errors import FencedError, NotFoundError
from storage.object_store import exists
from storage.testing import FakeIds
from tests.unit.dstl_service.interleaving import PausingStore
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import opened

Deleting = Callable[[JobHistory, PausingStore], object]


def subsumed_history() -> tuple[JobHistory, list[Deletion], RetentionTracker]:
    """Return a job whose first three checkpoints were subsumed long ago and are about to be deleted."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    history.complete(history.object(1))
    history.complete(history.object(2))
    assert history.newest is not None
    book = RetentionTracker(RetentionSettings(checkpoints_max=1, delay_s=0))
    book.begin(history.jobs.chain(history.newest.ref))
    history.compact(history.object(3))
    book.completed(history.newest, now_ms=0)
    history.clock.advance(10 * ORPHAN_AGE_MIN_MS)
    return history, book.take_due(0), book


def retention(history: JobHistory, due: list[Deletion], book: RetentionTracker) -> Deleting:
    return lambda _, store: delete_subsumed(store, opened(store, 5), due, book.spared, history.epoch)


def collection(history: JobHistory, *_: object) -> Deleting:
    return lambda _, store: collect_garbage(store, opened(store, 5), "job", history.clock, checkpoints_max=1)


def to_checkpoint(job_store: JobStore) -> None:
    """Rewind the job to a checkpoint with a setting that retains more of them."""
    with suppress(NotFoundError):  # its deletion has begun
        rewind(job_store, "job", FakeIds(8), checkpoint_id=1, write=True)


def to_savepoint(job_store: JobStore) -> None:
    """Rewind the job to a savepoint, and delete the savepoint."""
    rewind(job_store, "job", FakeIds(8), savepoint="kept", write=True)
    job_store.savepoints.delete("kept")


def check_whole(job_store: JobStore, history: JobHistory) -> None:
    """Check that all objects of the newest checkpoint and of all savepoints exist."""
    newest = job_store.newest()
    assert newest is not None
    kept = {handle.object_key for handle in job_store.state(newest.ref).log}
    for _, savepoint in job_store.savepoints.all():
        kept |= object_keys(savepoint)
    assert [key for key in kept if not exists(history.store, key)] == []


@pytest.mark.parametrize("deleting", [retention, collection])
@pytest.mark.parametrize("setting_back", [to_checkpoint, to_savepoint])
def test_rewind_during_deletion(deleting: Callable[..., Deleting], setting_back: Callable[[JobStore], None]) -> None:
    """I11: whatever is being deleted, a rewind either reaches a whole target or reports that the target is gone."""
    call, calls = 0, 8
    while call < calls:
        history, due, book = subsumed_history()
        if setting_back is to_savepoint:
            history.jobs.make_savepoint("kept", 1)
        store = PausingStore(history.store)
        store.pause_before(call, lambda: setting_back(opened(history.store, 7)))  # noqa: B023 - called in this round
        with suppress(NotFoundError):  # a savepoint that it was about to read is gone; the deletion is retried later
            deleting(history, due, book)(history, store)

        check_whole(opened(history.store, 6), history)
        call, calls = call + 1, max(calls, store.calls)


def test_manifest_left_behind_goes_before_its_objects() -> None:
    """I11: a manifest left by an earlier process is deleted before its objects, so that no savepoint is made of it."""
    history, due, book = subsumed_history()
    left = due[0].manifests[0]
    due = [Deletion(0, due[0].manifests[1:], due[0].object_keys)]
    maker = opened(history.store, 2)
    found = maker.resolve(left)

    delete_subsumed(history.store, history.jobs, due, book.spared, history.epoch)

    with pytest.raises(NotFoundError, match="subsumed"):
        maker.keep("late", found)
    assert maker.savepoints.names() == []


def test_coordinator_that_was_replaced_deletes_nothing() -> None:
    """I11: a replaced coordinator deletes nothing; the decision is the new owner's."""
    history, due, book = subsumed_history()
    before = history.stored()
    opened(history.store, 2).claim("another")

    deleted = delete_subsumed(history.store, history.jobs, due, book.spared, history.epoch)

    assert (deleted.is_owner, deleted.objects, history.stored()) == (False, 0, before)


def test_coordinator_that_was_replaced_by_an_epoch_that_was_lost() -> None:
    """I4, I11: an owner is replaced although the epoch record after its own was lost and a rebuild left a gap."""
    history, due, book = subsumed_history()
    history.jobs.make_savepoint("kept", 1)
    to_savepoint(opened(history.store, 2))
    history.store.put(epoch_key("job", history.epoch + 1), b"damaged")
    assert rebuild_registry(history.store, "job", history.clock, FakeIds(3), write=True).moved
    before = history.stored()

    deleted = delete_subsumed(history.store, history.jobs, due, book.spared, history.epoch)

    assert (deleted.is_owner, deleted.objects, history.stored()) == (False, 0, before)
    check_whole(opened(history.store, 4), history)
    with pytest.raises(FencedError, match="taken over by epoch"):
        history.jobs.check_still_newest(history.epoch)
