"""Orphans are found and deleted; objects that a checkpoint names, or may still come to name, stay."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstl_service.checkpoints.rewind import rewind
from dstl_service.cli import main
from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, collect_garbage
from dstl_service.formats.manifest import Manifest, ManifestKind, object_keys
from dstl_service.formats.under_way import UnderWay, UnderWaySnapshot
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.unfinished_objects import UnfinishedObjects
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError, DstlError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.open import open_store
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.interleaving import StaleStore
from tests.unit.dstl_service.job_history import JobHistory
from tests.unit.dstl_service.samples import opened
from tests.unit.dstl_service.snapshots import FILES, index_of, store_snapshot

AGE = ORPHAN_AGE_MIN_MS


def test_old_orphan_is_deleted() -> None:
    """An object that no checkpoint names is deleted once it is old enough (I12)."""
    history = JobHistory()
    named, orphan = history.object(0), history.object(0)
    history.complete(named)
    history.clock.advance(AGE)

    report = history.collect()

    assert report.orphans == [orphan.object_key]
    assert report.orphan_bytes == orphan.object_size_bytes
    assert history.stored() == {named.object_key}


def test_young_object_stays() -> None:
    """An object that a running checkpoint may still come to name stays, although nothing names it (I11)."""
    history = JobHistory()
    history.complete(history.object(0))
    history.clock.advance(AGE)
    young = history.object(1)
    history.clock.advance(AGE - 1)

    report = history.collect()

    assert (report.young, report.orphans) == (1, [])
    assert young.object_key in history.stored()


def test_object_of_long_batch_stays() -> None:
    """An object that the running batch may still name stays, however long the batch takes (I11)."""
    history = JobHistory()
    history.complete(history.object(0))
    early = history.object(1)
    history.clock.advance(100 * AGE)

    assert (history.collect().young, history.collect().orphans) == (1, [])

    history.complete(early)
    assert history.collect().orphans == []
    assert early.object_key in history.stored()


def test_object_of_repeated_batch_goes() -> None:
    """An object of an earlier try at a checkpoint is an orphan once the checkpoint exists (I12)."""
    history = JobHistory()
    history.complete(history.object(0))
    left, taken = history.object(1), history.object(1)
    history.complete(taken)
    history.clock.advance(AGE)

    assert history.collect().orphans == [left.object_key]


def test_object_of_fenced_driver_goes() -> None:
    """Objects of a fenced driver are orphans: nothing can name them any more (I4, I12)."""
    history = JobHistory()
    history.complete(history.object(0))
    left = history.object(1)
    history.jobs.claim("newer")
    history.clock.advance(AGE)

    assert history.collect().orphans == [left.object_key]


def test_object_of_vanished_driver_goes() -> None:
    """Objects of a driver that never returned stay until the next driver begins, whatever the clock says (I12)."""
    history = JobHistory()
    history.complete(history.object(0))
    left = history.object(1)
    history.clock.advance(10_000 * AGE)
    assert history.collect().orphans == []

    history.epoch, _ = history.jobs.claim("next")
    assert history.collect().orphans == [left.object_key]


def test_damaged_orphan_goes() -> None:
    """An object that is not a segment object is deleted once the next checkpoint, or the next epoch, exists (I12)."""
    ends: tuple[Callable[[JobHistory], object], ...] = (
        lambda history: history.complete(history.object(1)),
        lambda history: history.jobs.claim("newer"),
    )
    for end in ends:
        history = JobHistory()
        history.complete(history.object(0))
        history.store.put("job/segments/host/torn.seg", b"torn")
        history.clock.advance(AGE)

        assert [history.collect().orphans for _ in range(3)] == [[]] * 3
        end(history)
        assert history.collect().orphans == ["job/segments/host/torn.seg"]


@pytest.mark.parametrize("error", [CorruptDataError, NotFoundError])
def test_index_that_could_not_be_read_once_keeps_its_object(error: type[DstlError]) -> None:
    """I11: a failed read says nothing about the object: a running batch's change sets stay."""
    store = FaultyStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    history.complete(history.object(0))
    running = history.object(1)
    history.clock.advance(AGE)
    store.inject(Fault("get_range", FaultKind.FAIL_BEFORE, running.object_key, error=lambda: error("injected")))

    assert [history.collect().orphans for _ in range(3)] == [[]] * 3


@pytest.mark.parametrize("error", [CorruptDataError, NotFoundError])
def test_index_that_cannot_be_read_here_keeps_what_is_named_later(error: type[DstlError]) -> None:
    """I11: however often the collector's host fails to read an object, the running batch's checkpoint may name it."""
    store = FaultyStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    history.complete(history.object(0))
    running = history.object(1)
    history.clock.advance(AGE)
    for _ in range(5):
        store.inject(Fault("get_range", FaultKind.FAIL_BEFORE, running.object_key, error=lambda: error("injected")))
        assert history.collect().orphans == []

    history.complete(running)
    assert history.collect().orphans == []
    assert running.object_key in history.stored()


def test_leftovers_of_kills_go(tmp_path: Path) -> None:
    """
    Probes and temporary files of killed processes are deleted with the orphans (I12).

    The minimum age of orphans does not apply to them, as they are in no job's folder: running calls may own young ones.
    """
    store = open_store(f"file://{tmp_path}")
    history = JobHistory(store)
    history.complete(history.object(0))
    old = [tmp_path / "probe" / ("0" * 32), tmp_path / ".tmp" / ("2" * 32)]
    young = [tmp_path / "probe" / ("1" * 32), tmp_path / ".tmp" / ("3" * 32)]
    for path in (*old, *young):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in old:
        os.utime(path, (1, 1))

    assert main(["gc", "--storage", f"file://{tmp_path}", "--age-min-s", "0", "--delete", "job"]) == 0

    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in young)


def test_whole_log_stays_after_complete_manifest() -> None:
    """Objects of checkpoints before a complete manifest are named by it, however old (I11)."""
    history = JobHistory()
    handles = [history.object(number) for number in range(3)]
    history.complete(handles[0])
    history.complete(handles[1], kind=ManifestKind.COMPLETE)
    history.complete(handles[2])
    history.clock.advance(10 * AGE)

    assert history.collect().orphans == []
    assert history.stored() == {handle.object_key for handle in handles}


def test_dry_run_deletes_nothing() -> None:
    """A dry run reports the orphans and leaves them."""
    history = JobHistory()
    named, orphan = history.object(0), history.object(0)
    history.complete(named)
    history.clock.advance(AGE)

    assert history.collect(dry_run=True).orphans == [orphan.object_key]
    assert history.stored() == {named.object_key, orphan.object_key}


def test_lost_manifests_delete_nothing() -> None:
    """Where no checkpoint is found, objects of any age stay: they may be all that is left (I11)."""
    history = JobHistory()
    handle = history.object(0)
    history.complete(handle)
    history.store.delete([info.key for info in history.store.list("job/checkpoints/")])
    history.clock.advance(10 * AGE)

    report = history.collect()

    assert (report.orphans, report.named) == ([], 1)
    assert history.stored() == {handle.object_key}


def test_damaged_manifest_stops_collection() -> None:
    """If a manifest of the chain cannot be read, nothing is deleted (I11)."""
    history = JobHistory()
    history.complete(history.object(0))
    orphan = history.object(0)
    history.clock.advance(AGE)
    key = next(info.key for info in history.store.list("job/checkpoints/00000000000000000000.000001"))
    history.store.delete([key])
    history.store.put(key, b"damaged")
    history.jobs = JobStore(history.store, "job", history.clock, history.ids)

    with pytest.raises(CorruptDataError):
        history.collect()

    assert orphan.object_key in history.stored()


def test_fence_does_not_hide_the_chain() -> None:
    """After a take-over the chain before the fence counts, and its objects stay (I11)."""
    history = JobHistory()
    handle = history.object(0)
    history.complete(handle)
    history.jobs.claim("another")
    history.clock.advance(AGE)

    assert history.collect().orphans == []
    assert history.stored() == {handle.object_key}


def test_command_lists_then_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dstl gc`` lists orphans, and deletes them only when told to."""
    store = open_store(f"file://{tmp_path}")
    history = JobHistory(store)
    history.complete(history.object(0))
    orphan = history.object(0)
    command = ["gc", "--storage", f"file://{tmp_path}", "--age-min-s", "0", "job"]

    assert main(command) == 0
    listed = capsys.readouterr().out
    assert orphan.object_key in history.stored()
    assert main([*command, "--delete"]) == 0

    assert orphan.object_key in listed
    assert "1 orphans of" in listed
    assert orphan.object_key not in history.stored()
    assert len(history.stored()) == 1


def test_command_names_missing_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dstl gc`` of a job that does not exist says so and fails."""
    assert main(["gc", "--storage", f"file://{tmp_path}", "nothing"]) == 2
    assert "there is no job 'nothing'" in capsys.readouterr().err


def test_young_subsumed_checkpoint_stays_whole() -> None:
    """I11: while a subsumed manifest is too young to delete, everything it needs stays; then all of it is deleted."""
    history = JobHistory()
    objects = [history.object(0) for _ in range(5)]
    history.complete(objects[0], kind=ManifestKind.COMPLETE)
    history.complete(objects[1])
    history.clock.advance(AGE)
    history.complete(objects[2])  # young, and needs the two before it
    history.compact(objects[3], objects[4])

    assert history.collect(checkpoints_max=1).subsumed == 0
    assert history.stored() == {handle.object_key for handle in objects}
    history.clock.advance(AGE)
    assert history.collect(checkpoints_max=1).subsumed == 3
    assert history.stored() == {handle.object_key for handle in objects[3:]}


def under_way(version: CheckpointRef, *uids: str) -> UnderWay:
    """Return a list of snapshots of several tables, and of a compaction with the last uid."""
    *snapshots, compaction = uids
    tables = [KeyGroupRange(number, number) for number in range(len(snapshots))]
    listed = [UnderWaySnapshot("op", table, version, uid) for table, uid in zip(tables, snapshots, strict=True)]
    return UnderWay(tuple(listed), (compaction,))


@pytest.mark.parametrize("clock_is_ahead_ms", [-3_600_000, 0, 3_600_000, 10**12])
def test_wrong_clock_takes_nothing_that_is_needed(clock_is_ahead_ms: int) -> None:
    """I11: snapshots, results and sets that a checkpoint may still name stay, whatever the collector's clock says."""
    history = JobHistory()
    history.complete(history.object(0))
    assert history.newest is not None
    version = history.newest.ref
    history.complete(history.object(1), under_way=under_way(version, "uid", "compaction"))
    store_snapshot(history.store, index_of(version, key_groups=KeyGroupRange(0, 0)))
    history.store.put("job/segments/host/compaction=0.seg", b"result")
    running = history.object(2)
    clock = FakeClock(history.clock.now_ms() + clock_is_ahead_ms)

    report = collect_garbage(history.store, history.jobs, "job", clock)

    assert (report.orphans, report.young) == ([], len(FILES) + 3)
    assert running.object_key in history.stored()


def test_what_is_let_go_of_goes_at_any_age() -> None:
    """I12: an object that the newest manifest neither lists nor names is deleted at any age: nothing will name it."""
    history = JobHistory()
    history.complete(history.object(0))
    assert history.newest is not None
    version = history.newest.ref
    history.complete(history.object(1), under_way=under_way(version, "uid", "compaction"))
    store_snapshot(history.store, index_of(version, key_groups=KeyGroupRange(0, 0)))
    history.store.put("job/segments/host/compaction=0.seg", b"result")
    history.complete(history.object(2))

    report = collect_garbage(history.store, history.jobs, "job", history.clock, age_min_ms=0)

    assert len(report.orphans) == len(FILES) + 2
    assert len(history.stored()) == 3


def test_rewind_lets_go_of_what_was_under_way() -> None:
    """I11: an object dropped from the list is never listed again, for a collector may be about to delete it."""
    history = JobHistory()
    history.complete(history.object(0))
    assert history.newest is not None
    version = history.newest.ref
    history.complete(history.object(1), under_way=under_way(version, "uid", "compaction"))
    history.store.put("job/segments/host/compaction=0.seg", b"result")
    history.complete(history.object(2))
    rewind(history.jobs, "job", history.ids, checkpoint_id=1, write=True)

    report = collect_garbage(history.store, history.jobs, "job", history.clock, age_min_ms=0)
    assert report.orphans == ["job/segments/host/compaction=0.seg"]


def test_rewind_in_the_middle_of_a_collection_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: a savepoint that is rewound to and then deleted during a collection loses nothing, even if never listed."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    history.jobs.make_savepoint("kept", None)
    history.compact(history.object(1))
    history.clock.advance(AGE)
    assert history.collect(checkpoints_max=1).subsumed == 1
    every = history.jobs.savepoints.all

    def after_rewind() -> Iterator[tuple[str, Manifest]]:
        monkeypatch.undo()
        jobs = opened(history.store, host=5)
        rewind(jobs, "job", history.ids, savepoint="kept", write=True)
        jobs.savepoints.delete("kept")
        return every()

    monkeypatch.setattr(history.jobs.savepoints, "all", after_rewind)

    assert history.collect(checkpoints_max=1).orphans == []
    newest = opened(history.store).newest()
    assert newest is not None
    assert object_keys(newest) <= history.stored()


def test_index_that_retention_deletes_ends_no_collection() -> None:
    """I12: an index that is deleted with its manifest while the collector runs is needed by nobody."""
    history = JobHistory()
    history.complete(history.object(0), kind=ManifestKind.COMPLETE)
    assert history.newest is not None
    index = index_of(history.newest.ref, job_uid=history.jobs.job_uid)
    handle = store_snapshot(history.store, index)
    history.complete(history.object(1), kind=ManifestKind.COMPLETE, materializations=(handle,))
    subsumed = history.newest.ref
    history.complete(history.object(2), kind=ManifestKind.COMPLETE)
    history.store.delete([handle.index_key])
    with pytest.raises(CorruptDataError, match=handle.index_key):
        history.collect()

    # The collector remembers the manifest, as if it had read it just before it was deleted.
    history.store.delete([f"job/checkpoints/{subsumed.id:020d}.{subsumed.generation:06d}.json"])
    history.clock.advance(AGE)

    assert set(history.collect().orphans) == {file.object_key for file in index.files}


def test_manifest_that_retention_deletes_ends_no_collection() -> None:
    """I12: a subsumed manifest that its coordinator deletes while the collector reads it causes no error."""
    store = FaultyStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    for number in range(3):
        history.complete(history.object(number), kind=ManifestKind.COMPLETE)
    history.jobs.forget()
    gone = Fault(
        "get", FaultKind.FAIL_BEFORE, f"job/checkpoints/{0:020d}*", error=lambda: NotFoundError("gone"), skip=1
    )
    store.inject(gone)

    assert history.collect(checkpoints_max=1).subsumed == 0


def test_steady_collection_only_lists() -> None:
    """I12: a collection of a job with 1,000 tables costs at most one request per 100 objects: indexes are cached."""
    store = RecordingStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    history.complete(history.object(0))
    assert history.newest is not None
    handles = []
    for number in range(1000):
        table = KeyGroupRange(number, number)
        index = index_of(history.newest.ref, uid=f"m{number}", job_uid=history.jobs.job_uid, key_groups=table)
        handles.append(store_snapshot(store, index))
    history.complete(history.object(1), kind=ManifestKind.COMPLETE, materializations=tuple(handles))
    objects = history.collect().objects
    store.clear()

    assert history.collect().objects == objects > 5000
    pages = -(-objects // 1000) + len(store.keys("list"))
    assert len(store.calls) - len(store.keys("list")) + pages <= objects // 100
    assert store.count("get", "*materialized*") == 0


def test_long_batch_is_looked_at_once() -> None:
    """Objects that may still be named are read by one collection only, and each later one judges them again."""
    store = RecordingStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    history.complete(history.object(0))
    early = [history.object(1) for _ in range(5)]
    history.clock.advance(AGE)
    assert history.collect().young == 5
    store.clear()

    assert [history.collect().young for _ in range(3)] == [5, 5, 5]
    assert store.keys("get_range", "*.seg") == store.keys("get", "*.seg") == []

    history.complete(early[0])
    assert history.collect().orphans == sorted(handle.object_key for handle in early[1:])


def test_only_so_many_objects_are_remembered() -> None:
    """Beyond the limit, each object costs a request per collection; the verdicts are the same."""
    store = RecordingStore(MemoryStore(clock=FakeClock(1_000_000_000)))
    history = JobHistory(store)
    history.complete(history.object(0))
    kept = {history.object(1).object_key for _ in range(5)}
    objects = [info for info in store.list("job/segments/") if info.key in kept]
    unfinished = UnfinishedObjects(store, objects_max=2)
    for _ in range(2):
        store.clear()
        assert {info.key for info in unfinished.among(objects, 0, history.epoch)} == kept

    assert len({*store.keys("get_range")}) == 3
    assert unfinished.among(objects, 1, history.epoch) == unfinished.among(objects, 0, history.epoch + 1) == set()


def test_collector_with_old_listings_sees_what_is_under_way() -> None:
    """I11: the newest manifest is read even if the file system's listing of manifests is stale."""
    history = JobHistory()
    history.complete(history.object(0))
    stale = StaleStore(history.store, "job/checkpoints/")
    uid = "0123456789abcdef" * 2
    history.complete(history.object(1), under_way=UnderWay(compactions=(uid,)))
    history.store.put(f"job/segments/host/{uid}=0.seg", b"compacted")
    history.clock.advance(10 * ORPHAN_AGE_MIN_MS)
    jobs = JobStore(stale, "job", history.clock, FakeIds(3))
    jobs.open(None)

    assert collect_garbage(stale, jobs, "job", history.clock).orphans == []
    assert f"job/segments/host/{uid}=0.seg" in history.stored()
