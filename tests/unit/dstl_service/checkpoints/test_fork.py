"""Forks: a job that begins with another one's state, and names its objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dstl_service.checkpoints.fork import ForkReport, describe_fork, fork_job
from dstl_service.checkpoints.rewind import rewind
from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, GarbageReport, collect_garbage
from dstl_service.collection.retention import RetentionSettings, RetentionTracker
from dstl_service.collection.subsumed_deletion import delete_subsumed
from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.checksummed_json import seal, unseal
from dstl_service.formats.keys import decode_job
from dstl_service.formats.manifest import Manifest, ManifestKind, decode_manifest, encode_manifest, object_keys
from dstl_service.formats.materialization_index import MaterializationIndex, SnapshotFile, encode_index, file_key
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.lives import Lives
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from dstl_service.wire import SET_ASIDE, SINK, OperatorInfo, RowsSetAside
from storage.checksum import checksum128
from storage.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, MaterializationHandle, Segment, SegmentHandle, SegmentKind, Writer
from storage.object_store import ObjectStore
from storage.segment_format import encode_object
from storage.testing import FakeIds, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.interleaving import PausingStore
from tests.unit.dstl_service.job_history import JobHistory

RETAINED = 2
KEY_GROUPS = KeyGroupRange(0, 127)


class Family:
    """A parent job with four checkpoints, and what people and collectors do to it and to its forks."""

    def __init__(self) -> None:
        self.parent = JobHistory()
        self.store = self.parent.store
        self._hosts = 1
        for checkpoint_id in range(4):
            self.parent.complete(self.parent.object(checkpoint_id))

    def fork(self, name: str = "fork", of: str = "job", store: ObjectStore | None = None, **at: object) -> ForkReport:
        """Fork a job, through another store if one is given."""
        parent, clock = self.jobs(of, store), self.parent.clock
        return fork_job(store or self.store, parent, of, name, clock, self.ids(), **at)  # type: ignore[arg-type] # any

    def jobs(self, name: str = "fork", store: ObjectStore | None = None) -> JobStore:
        """Return a job's store as seen by a new process."""
        made = JobStore(store or self.store, name, self.parent.clock, self.ids())
        made.open(None)
        return made

    def ids(self) -> FakeIds:
        """Return the ids of a new process."""
        self._hosts += 1
        return FakeIds(self._hosts)

    def batch(self, name: str = "fork", *, compacts: bool = False) -> Manifest:
        """Take a job over and complete its next checkpoint, whose own object may replace all state before."""
        jobs = self.jobs(name)
        epoch, base = jobs.claim("test")
        assert base is not None
        kind = SegmentKind.BASE if compacts else SegmentKind.CHANGES
        set_id = ChangeSetId(name, "op", base.id + 1, Writer(epoch, 1), 0, 0)
        buffers, entries = encode_object([Segment.of(set_id, KeyGroupRange(0, 127), 1, b"payload", kind)])
        key = f"{name}/segments/host/{self.ids().unique_id()}.seg"
        self.store.put(key, buffers)
        handle = SegmentHandle(key, sum(map(len, buffers)), entries[0])
        made = replace(
            base,
            kind=ManifestKind.COMPLETE if compacts else ManifestKind.DELTA,
            id=base.id + 1,
            uid=self.ids().unique_id(),
            epoch=epoch,
            base=base.ref,
            segments=() if compacts else (handle,),
            earlier=(handle,) if compacts else (),
            materializations=(),
            note=None,
            rewound_from=None,
        )
        return jobs.create_manifest(made)[0]

    def snapshot(self, name: str, number: int, *shared: SnapshotFile) -> tuple[MaterializationHandle, SnapshotFile]:
        """Store a snapshot with a file of its own, and files that it shares; return it and that file."""
        jobs, uid, data = self.jobs(name), self.ids().unique_id(), b"file %d" % number
        table, checksum = (name, "op", KEY_GROUPS, uid), checksum128(data)
        file = f"{number:06d}.sst"
        own = SnapshotFile(file, file_key(*table, file, checksum, len(data)), len(data), checksum)
        self.store.put(own.object_key, data)
        newest = jobs.newest()
        assert newest is not None
        index = MaterializationIndex(jobs.job_uid, "op", KEY_GROUPS, newest.ref, uid, (), (*shared, own))
        handle = index.handle(name)
        self.store.put(handle.index_key, encode_index(index))
        return handle, own

    def take(self, name: str, snapshot: MaterializationHandle) -> None:
        """Complete checkpoints that have nothing but this snapshot, until no other one is retained; collect."""
        jobs = self.jobs(name)
        epoch, _ = jobs.claim("test")
        for _ in range(RETAINED + 1):
            base = jobs.newest()
            assert base is not None
            jobs.create_manifest(
                replace(
                    base,
                    kind=ManifestKind.COMPLETE,
                    id=base.id + 1,
                    uid=self.ids().unique_id(),
                    epoch=epoch,
                    base=base.ref,
                    segments=(),
                    earlier=(),
                    materializations=(snapshot,),
                    note=None,
                )
            )
        self.collect(name)
        self.collect(name)

    def collect(self, name: str = "fork") -> GarbageReport:
        """Collect a job's garbage, after a time in which everything became old enough."""
        self.parent.clock.advance(10 * ORPHAN_AGE_MIN_MS)
        jobs = self.jobs(name)
        return collect_garbage(self.store, jobs, name, self.parent.clock, checkpoints_max=RETAINED)

    def go_on(self, name: str = "job") -> None:
        """Have a job replace all its state, several times, and collect what is left."""
        for _ in range(RETAINED + 1):
            self.batch(name, compacts=True)
        for _ in range(2):
            self.collect(name)

    def delete(self, name: str) -> None:
        """Delete a job at once."""
        deletions = Deletions(self.store, self.parent.clock, self.ids())
        deletions.collect(deletions.bury(name, "ann", 0))

    def missing(self, name: str = "fork") -> set[str]:
        """Return the objects that a job's newest checkpoint needs, and that are gone."""
        jobs = self.jobs(name)
        newest = jobs.newest()
        assert newest is not None
        named = {handle.object_key for handle in jobs.state(newest.ref).log} | object_keys(newest)
        return named - {info.key for info in self.store.list("")}

    def holds(self, of: str = "job") -> list[str]:
        """Return the kinds of savepoints that a job keeps for forks."""
        return sorted(name.split("-")[1] for name in self.jobs(of).savepoints.names("fork-"))


@pytest.fixture
def family() -> Family:
    """Return a parent, without forks."""
    return Family()


@contextmanager
def killed_at(family: Family, number: int) -> Iterator[FaultyStore]:
    """Yield a store whose user dies before a put, or at the first deletion."""
    faulty = FaultyStore(family.store)
    faulty.inject(Fault("put", FaultKind.FAIL_BEFORE, skip=number, times=None))
    faulty.inject(Fault("delete", FaultKind.FAIL_BEFORE, times=None))
    yield faulty


def fork_that_dies(family: Family, puts: int) -> bool:
    """Fork a checkpoint in a process that dies before a put; return whether the fork is decided."""
    with killed_at(family, puts) as store, suppress(UnavailableError):
        family.fork(store=store, checkpoint_id=2)
    return JobStore(family.store, "fork", family.parent.clock, family.ids()).exists()


def test_fork_has_the_state_of_its_parent(family: Family) -> None:
    """The fork's first checkpoint has the id and the state of the parent's, whose objects it names."""
    report = family.fork(checkpoint_id=2)

    first = family.jobs().newest()
    assert first is not None
    assert first.ref.to_text() == report.first
    assert (first.id, first.base, first.epoch, first.forked_from and first.forked_from.job) == (2, None, 0, "job")
    parents = family.parent.jobs.newest_of(2)
    assert parents is not None
    assert report.checkpoint == parents.ref.to_text()
    log = family.parent.jobs.state(parents.ref).log
    assert family.jobs().state(first.ref).log == log
    assert not [info for info in family.store.list("fork/segments/") if "/rewind/" not in info.key]
    assert family.holds() == ["hold"]
    assert check_job(family.store, "fork").problems == []


def test_fork_goes_on_by_itself(family: Family) -> None:
    """Both jobs complete checkpoints of the same ids, and none sees those of the other."""
    family.fork()
    mine, theirs = family.batch("fork"), family.batch("job")

    assert (mine.id, theirs.id) == (4, 4)
    assert family.jobs("fork").newest() == mine
    assert family.jobs("job").newest() == theirs


def test_parent_keeps_what_its_fork_needs(family: Family) -> None:
    """I11: collections of a parent that has replaced all its state delete no object that a fork names."""
    family.fork()
    family.go_on("job")

    assert family.missing() == set()
    family.batch()
    assert family.missing() == set()
    assert check_job(family.store, "fork").problems == []


def test_fork_deletes_no_object_of_its_parent(family: Family) -> None:
    """I11: a fork that has replaced all its state leaves the objects of its parent alone."""
    before = family.parent.stored()
    family.fork()
    family.go_on("fork")

    assert family.parent.stored() >= before
    assert family.missing("job") == set()


def test_subsumed_checkpoints_of_a_fork_take_nothing_of_its_parent(family: Family) -> None:
    """I11: what only subsumed checkpoints of a fork name is deleted, except what is the parent's."""
    family.fork()
    jobs, before = family.jobs(), family.parent.stored()
    tracker = RetentionTracker(RetentionSettings(checkpoints_max=1, delay_s=0))
    first = jobs.newest()
    assert first is not None
    tracker.begin([first])
    tracker.completed(family.batch(compacts=True), 0)
    newest = family.batch(compacts=True)
    tracker.completed(newest, 0)
    deleted = delete_subsumed(family.store, jobs, tracker.take_due(0), tracker.spared, newest.epoch)

    assert deleted.objects == 2  # the first checkpoint's note, and the second one's object
    assert family.parent.stored() == before
    assert family.missing("job") == set()


def test_hold_goes_when_the_fork_names_nothing_of_others(family: Family) -> None:
    """I12: the parent's objects are garbage as soon as neither checkpoints nor savepoints of the fork name them."""
    before = family.parent.stored()
    family.fork()
    family.jobs().make_savepoint("kept", None)
    family.go_on("fork")
    assert family.holds() == ["hold"]

    family.jobs().delete_savepoint("kept")
    family.collect("fork")
    assert family.holds() == []
    family.go_on("job")
    assert family.parent.stored() & before == set()


def test_fork_with_other_key_groups(family: Family) -> None:
    """Its first checkpoint has the tables of its parent, and says so; a version that cannot rewrite them is refused."""
    report = family.fork(max_parallelism=24)

    jobs = family.jobs()
    first = jobs.newest()
    assert first is not None
    assert (jobs.max_parallelism, report.max_parallelism, report.rewritten_from) == (24, 24, 128)
    assert first.forked_from is not None
    assert first.forked_from.is_before_rewriting(first.ref)
    assert json.loads(family.store.get("fork/job.json"))["format"] == 3
    assert "Its first start rewrites the state from 128 key groups to 24" in describe_fork(report)
    assert family.fork(max_parallelism=24) == family.fork() == replace(report, is_new=False)
    with pytest.raises(ConflictError, match="exists with max_parallelism 24, not 25"):
        family.fork(max_parallelism=25)
    assert check_job(family.store, "fork").problems == []


def test_fork_with_the_same_key_groups_is_as_any_other(family: Family) -> None:
    """A fork that names its parent's number of key groups has nothing to rewrite."""
    assert family.fork(max_parallelism=128).rewritten_from is None
    assert json.loads(family.store.get("fork/job.json"))["format"] == 2


@pytest.mark.parametrize("lost", ["job.json", "checkpoints/", ""])
def test_rebuilt_fork_has_its_key_groups(family: Family, lost: str) -> None:
    """I10, I14: a fork's notes say that its first tables have other key groups; else they would be used as they are."""
    family.fork(max_parallelism=24)
    before, record = family.jobs().newest(), family.store.get("fork/job.json")
    assert before is not None
    for prefix in (lost,) if lost else ("job.json", "checkpoints/"):
        family.store.delete([info.key for info in family.store.list(f"fork/{prefix}")])
    rebuild_registry(family.store, "fork", family.parent.clock, family.ids(), write=True)

    jobs = family.jobs()
    newest = jobs.newest()
    assert newest is not None
    assert newest.forked_from is not None
    assert newest.forked_from.is_before_rewriting(newest.ref)
    assert (newest.forked_from, jobs.max_parallelism) == (before.forked_from, 24)
    assert decode_job(family.store.get("fork/job.json"), "") == decode_job(record, "")


def test_rebuilt_tables_are_not_rewritten_again(family: Family) -> None:
    """I14: with the key groups of the parent half of them were not read; a rebuilt checkpoint may have no base."""
    family.fork(max_parallelism=256)
    family.batch()
    family.batch(compacts=True)
    family.jobs().make_savepoint("kept", None)
    family.store.delete([info.key for info in family.store.list("fork/checkpoints/")])
    rebuild_registry(family.store, "fork", family.parent.clock, family.ids(), write=True)

    newest = family.jobs().newest()
    assert newest is not None
    assert newest.forked_from is not None
    assert (newest.base, newest.id) == (None, 5)
    assert not newest.forked_from.is_before_rewriting(newest.ref)
    assert family.fork("second", of="fork").checkpoint == newest.ref.to_text()


def test_nothing_begins_at_tables_that_are_to_be_rewritten(family: Family) -> None:
    """I14: until a fork's tables are rewritten it is neither forked, nor rewound to there later."""
    family.fork(max_parallelism=24, checkpoint_id=2)
    with pytest.raises(InvalidInputError, match="start the query once, which rewrites them, and choose checkpoint 3"):
        family.fork("second", of="fork")
    family.jobs().make_savepoint("kept", None)
    rewritten = family.batch()
    for at in ({"savepoint": "kept"}, {"checkpoint_id": 2}):
        with pytest.raises(InvalidInputError, match="in its 128 key groups"):
            rewind(family.jobs(), "fork", family.ids(), write=True, **at)
    assert family.fork("second", of="fork").checkpoint == rewritten.ref.to_text()


@pytest.mark.parametrize("number", [0, -1, 32_769])
def test_impossible_key_groups_of_a_fork(family: Family, number: int) -> None:
    """A number of key groups out of bounds is refused before anything is made."""
    before = family.store.list("")
    with pytest.raises(InvalidInputError, match=f"within 1..32768, got {number}"):
        family.fork(max_parallelism=number)
    assert [info.key for info in family.store.list("")] == [info.key for info in before]


@pytest.mark.parametrize(
    ("rows", "is_lost", "told"), [(3, False, "3 rows set aside"), (0, False, "0 "), (2, True, "2 lost")]
)
def test_rows_that_are_set_aside_get_no_other_key_groups(family: Family, rows: int, is_lost: bool, told: str) -> None:
    """I14: what the log has by key groups refuses another number of them, and nothing is made; a plain fork has it."""
    aside = OperatorInfo("op.set-aside", 1, "", {}, kind=SET_ASIDE, set_aside=[_rows(rows, is_lost)])
    jobs = family.jobs("job")
    epoch, base = jobs.claim("test")
    assert base is not None
    jobs.create_manifest(replace(base, id=base.id + 1, uid="aside", epoch=epoch, base=base.ref, operators=(aside,)))

    with pytest.raises(InvalidInputError, match=told):
        family.fork(max_parallelism=24)
    assert family.holds() == []
    family.fork()


def _rows(rows: int, is_lost: bool) -> RowsSetAside:
    return RowsSetAside(4, 0, 127, rows, 10 * rows, is_lost=is_lost)


def test_fork_of_a_fork(family: Family) -> None:
    """I11: a fork's fork names objects of both; each hold goes after the one that relies on it."""
    family.fork("fork")
    family.batch("fork")
    family.fork("second", of="fork")
    for name in ("job", "fork"):
        family.go_on(name)

    assert family.missing("second") == set()
    assert (family.holds("job"), family.holds("fork")) == (["hold"], ["hold"])
    with pytest.raises(ConflictError, match="forks need its objects: second"):
        family.delete("fork")
    family.go_on("second")
    family.go_on("fork")
    assert (family.holds("job"), family.holds("fork")) == ([], [])


def test_parent_of_a_fork_is_not_deleted(family: Family) -> None:
    """I11: a deletion is refused, and leaves the parent as it was, until its fork is deleted."""
    family.fork()

    with pytest.raises(ConflictError, match="forks need its objects: fork"):
        family.delete("job")
    Deletions(family.store, family.parent.clock, family.ids()).check("job")
    assert family.missing() == set()
    family.delete("fork")
    family.delete("job")
    assert [info.key for info in family.store.list("") if not info.key.startswith("@")] == []


def test_collection_of_a_deletion_that_died_before_its_look_spares_forks(family: Family) -> None:
    """I11: a tombstone whose process died before it looked for forks is not collected while one needs the parent."""
    family.fork()
    dying = FaultyStore(family.store)
    dying.inject(Fault("list", FaultKind.FAIL_BEFORE, times=None))
    dying.inject(Fault("put", FaultKind.FAIL_BEFORE, "@fates/*", times=None))
    with pytest.raises(UnavailableError):
        Deletions(dying, family.parent.clock, family.ids()).bury("job", "ann", 0)
    deletions = Deletions(family.store, family.parent.clock, family.ids())

    assert deletions.of("job") is not None
    with pytest.raises(ConflictError, match="forks need its objects: fork"):  # a repeated deletion looks again
        deletions.bury("job", "ann", 0)
    assert deletions.collect_expired() == []
    assert family.missing() == set()
    family.delete("fork")
    assert [removal.job for removal in deletions.collect_expired()] == ["job"]


def test_deleted_forks_hold_is_collected(family: Family) -> None:
    """I12: the parent's collector deletes the hold of a fork that was deleted."""
    family.fork()
    family.delete("fork")

    family.collect("job")
    assert family.holds() == []


def test_fork_of_a_deleted_parent_is_refused(family: Family) -> None:
    """A parent that is marked as deleted is not forked, and a name whose job is deleted is not taken."""
    deletions = Deletions(family.store, family.parent.clock, family.ids())
    deletions.bury("job", "ann", 60)

    with pytest.raises(ConflictError, match="was deleted by ann"):
        family.fork()
    assert next(iter(family.store.list("fork/")), None) is None


@pytest.mark.parametrize("puts", range(40))
def test_fork_that_dies_anywhere_is_finished_or_never_was(family: Family, puts: int) -> None:
    """I3, I11, I12: wherever a fork dies, its job exists, and the next process finishes it, or nothing stays."""
    is_decided = fork_that_dies(family, puts)
    family.go_on("job")

    if is_decided:
        assert family.batch("fork").id == 3
        assert family.missing() == set()
        family.collect("job")
        assert [kind for kind in family.holds() if kind != "hold"] == []
    else:
        family.collect("job")
        assert family.holds() == []


@pytest.mark.parametrize("puts", range(20))
def test_one_collection_clears_up_what_a_fork_left_that_died(family: Family, puts: int) -> None:
    """I12: even if the dead fork's last change of the register takes effect only while its savepoint is deleted."""
    is_decided = fork_that_dies(family, puts)

    family.collect("job")
    assert is_decided or family.holds() == []


def test_repeated_fork_finishes_an_earlier_one(family: Family) -> None:
    """The same call, repeated after a crash, finds the job and completes it; for another checkpoint it is refused."""
    first = family.fork(checkpoint_id=2)
    again = family.fork(checkpoint_id=2)

    assert (again.first, again.is_new, first.is_new) == (first.first, False, True)
    assert family.holds() == ["hold"]
    with pytest.raises(ConflictError, match="was forked from 'job' at 2"):
        family.fork(checkpoint_id=3)
    with pytest.raises(ConflictError, match="exists and is not a fork"):
        family.jobs("third").claim("test")
        family.fork("third", checkpoint_id=3)


def test_fork_at_a_savepoint(family: Family) -> None:
    """A savepoint of a subsumed checkpoint can be forked, and deleted afterwards."""
    family.jobs("job").make_savepoint("kept", 1)
    family.go_on("job")
    report = family.fork(savepoint="kept")
    family.jobs("job").delete_savepoint("kept")
    family.collect("job")

    assert report.first.startswith("1.")
    assert family.missing() == set()


def test_what_cannot_be_forked(family: Family) -> None:
    """Unknown checkpoints, two targets at once and the parent's own name are refused, and leave nothing."""
    for at, error in (
        ({"checkpoint_id": 77}, NotFoundError),
        ({"savepoint": "none"}, NotFoundError),
        ({"savepoint": "none", "checkpoint_id": 1}, InvalidInputError),
    ):
        with pytest.raises(error):
            family.fork(**at)
    with pytest.raises(InvalidInputError, match="needs another name"):
        family.fork("job")
    assert family.holds() == []
    assert next(iter(family.store.list("fork/")), None) is None


def test_hold_is_not_deleted_by_hand(family: Family) -> None:
    """I11: the savepoint that a fork needs is deleted by nobody, until the fork is gone."""
    family.fork()
    (hold,) = family.jobs("job").savepoints.names("fork-")

    with pytest.raises(ConflictError, match="its fork 'fork' needs"):
        family.jobs("job").delete_savepoint(hold)
    family.delete("fork")
    family.jobs("job").delete_savepoint(hold)


def test_lost_hold_is_a_problem(family: Family) -> None:
    """`dstl fsck` of the fork says that nobody keeps what it names."""
    family.fork()
    (hold,) = family.jobs("job").savepoints.names("fork-")
    family.jobs("job").savepoints.delete(hold)

    (problem,) = check_job(family.store, "fork").problems
    assert "objects of other jobs are needed" in problem


def test_lost_hold_is_made_again(family: Family) -> None:
    """I11: a hold that was lost with its parent's savepoints is made by the fork's collector, of all that it names."""
    family.fork(checkpoint_id=1)
    family.batch()
    family.store.delete([info.key for info in family.store.list("job/savepoints")])
    family.collect("fork")
    family.go_on("job")

    assert family.holds() == ["hold"]
    assert family.missing() == set()
    for name in ("job", "fork"):
        assert check_job(family.store, name).problems == []
    (hold,) = family.jobs("job").savepoints.names("fork-")
    with pytest.raises(InvalidInputError, match="may be of no checkpoint"):
        rewind(family.jobs("job"), "job", family.ids(), savepoint=hold, write=True)
    with pytest.raises(InvalidInputError, match="may be of no checkpoint"):
        family.fork("second", savepoint=hold)


def test_hold_made_again_keeps_the_files_of_later_snapshots(family: Family) -> None:
    """I11: the parent keeps the files that a fork's snapshots share, although the snapshot that told of them goes."""
    before, file = family.snapshot("job", 1)
    family.take("job", before)
    family.fork()
    shares, _ = family.snapshot("fork", 2, file)
    family.take("fork", shares)
    family.store.delete([info.key for info in family.store.list("job/savepoints")])
    family.collect("fork")
    shares_too, _ = family.snapshot("fork", 3, file)
    family.take("fork", shares_too)
    family.go_on("job")

    stored = {info.key for info in family.store.list("")}
    assert shares.index_key not in stored
    assert file.object_key in stored
    assert check_job(family.store, "job").problems == []
    family.go_on("fork")
    family.collect("job")
    family.collect("job")
    assert file.object_key not in {info.key for info in family.store.list("")}


def test_hold_made_again_is_no_checkpoint_of_the_parent(family: Family) -> None:
    """I3: a rebuild of the parent restores its own newest checkpoint, however far the fork has got."""
    family.fork()
    for _ in range(3):
        family.batch()
    family.store.delete([info.key for info in family.store.list("job/savepoints")])
    family.collect("fork")
    rebuilt = partial(rebuild_registry, family.store, "job", family.parent.clock, family.ids())

    assert rebuilt().registry_problems == []
    family.store.delete([info.key for info in family.store.list("job/epochs/")])
    assert rebuilt(write=True).checkpoint.startswith("3.")


@pytest.mark.parametrize("at", [{}, {"checkpoint_id": 3}, {"savepoint": "kept"}])
def test_fork_that_died_is_finished_although_its_parent_went_on(family: Family, at: dict[str, Any]) -> None:
    """The same call finishes the fork where it began, although that is gone, until a driver has opened it."""
    made = family.jobs("job").make_savepoint("kept", 3)
    with killed_at(family, 18) as store, pytest.raises(UnavailableError):
        family.fork(store=store, **at)
    family.jobs("job").delete_savepoint("kept")
    family.go_on("job")

    with pytest.raises(NotFoundError, match="not retained"):
        family.fork(checkpoint_id=2)
    again = family.fork(**at)
    assert (again.checkpoint, again.is_new) == (made.ref.to_text(), False)
    assert family.missing() == set()
    family.batch()
    with pytest.raises(ConflictError, match="was forked from 'job' at 3"):
        family.fork()


@pytest.mark.parametrize("call", range(32))
def test_paused_driver_of_a_fork_finds_it_finished_by_others(family: Family, call: int) -> None:
    """Wherever it stands while others finish the fork, and maybe go on, it takes the job over and adds nothing."""
    with killed_at(family, 18) as store, pytest.raises(UnavailableError):
        family.fork(store=store)
    paused = PausingStore(family.store)
    paused.pause_before(call, lambda: family.go_on("fork") if call % 2 else family.fork())

    jobs = JobStore(paused, "fork", family.parent.clock, family.ids())
    jobs.open(None)
    with suppress(FencedError):
        jobs.claim("test")
    assert family.batch().id == (7 if paused.calls > call and call % 2 else 4)
    assert family.missing() == set()


@pytest.mark.parametrize("call", range(50))
def test_fork_that_is_deleted_meanwhile_is_an_error(family: Family, call: int) -> None:
    """Wherever a repeated fork stands when the fork is deleted, it ends with an error that says so, and leaves none."""
    family.fork()
    paused = PausingStore(family.store)
    paused.pause_before(call, lambda: family.delete("fork"))

    with suppress(NotFoundError, ConflictError):
        family.fork(store=paused)
    family.collect("job")
    assert len(family.holds()) == Lives(family.store, "fork").has_job()


def test_name_with_objects_that_forks_need_is_not_cleared(family: Family) -> None:
    """I11: a parent whose ``job.json`` is lost is not deleted, and gets no other uid, which no rebuild could follow."""
    family.fork()
    family.store.delete(["job/job.json"])
    deletions = Deletions(family.store, family.parent.clock, family.ids())

    with pytest.raises(ConflictError, match="forks need its objects: fork"):
        deletions.clear("job", "ann", 128)
    assert deletions.of("job") is None
    assert list(family.store.list("job/job.json")) == []


def test_fork_is_rewound_to_where_it_began(family: Family) -> None:
    """I11: a fork can be rewound to its first checkpoint while that is retained; the hold stays."""
    report = family.fork()
    family.batch()
    jobs = family.jobs()
    made = rewind(jobs, "fork", family.ids(), checkpoint_id=3, write=True)

    assert made.target.startswith("3.")
    assert made.target != report.first
    assert family.batch().id == 4
    family.collect("fork")
    assert family.missing() == set()
    assert family.holds() == ["hold"]


def test_fork_has_no_sinks(family: Family) -> None:
    """Output that was pending at the checkpoint is the parent's to publish: the fork has neither it nor the sink."""
    jobs, parent = family.parent.jobs, family.parent
    before = parent.newest
    assert before is not None
    handle = parent.object(4)
    output = replace(handle, entry=replace(handle.entry, id=replace(handle.entry.id, operator="output")))
    operators = (*before.operators, OperatorInfo("output", 2, "Sink", {}, kind=SINK, published=1))
    parent.complete(handle, output, operators=operators)
    family.fork()

    first, newest = family.jobs().newest(), parent.newest
    assert first is not None
    assert newest is not None
    assert [info.name for info in first.operators if info.is_sink] == []
    assert "output" not in {one.entry.id.operator for one in first.earlier}
    assert len(jobs.state(newest.ref).log) == len(first.earlier) + 1


@pytest.mark.parametrize("lost", ["job.json", "checkpoints/", "both"])
def test_forks_registry_is_rebuilt(family: Family, lost: str) -> None:
    """I10: from its own notes a fork finds the objects of its parent, and where it began."""
    family.fork()
    uid = family.jobs().job_uid
    prefixes = ("job.json", "checkpoints/") if lost == "both" else (lost,)
    for prefix in prefixes:
        family.store.delete([info.key for info in family.store.list(f"fork/{prefix}")])
    rebuild_registry(family.store, "fork", family.parent.clock, family.ids(), write=True)

    jobs = family.jobs()
    assert jobs.origin is not None
    assert (jobs.job_uid, jobs.origin.job) == (uid, "job")
    assert check_job(family.store, "fork").problems == []
    assert family.missing() == set()


def test_older_versions_do_not_open_a_fork(family: Family) -> None:
    """A version that knows no forks would begin with an empty state: the format's number keeps it away."""
    family.fork()

    assert json.loads(family.store.get("fork/job.json"))["format"] == 2
    assert json.loads(family.store.get("job/job.json"))["format"] == 1


@pytest.mark.parametrize("held_for", ["fork", "fork@", "fork@x", "../fork@0", 7])
def test_hold_of_no_fork_is_damaged(family: Family, held_for: object) -> None:
    """I10: what a savepoint says of its fork is checked when it is read, and nothing is looked up by it."""
    parents = family.parent.newest
    assert parents is not None
    data = seal("manifest", {**unseal("manifest", encode_manifest(parents), 1, "key"), "held_for": held_for})

    with pytest.raises(CorruptDataError, match="manifest key cannot be read"):
        decode_manifest(data, "key")


def test_origin_of_no_savepoint_is_damaged() -> None:
    """I10: an origin without a savepoint's name would release whatever its parent keeps."""
    origin = {"job": "job", "life": 0, "checkpoint": "1.0.x", "savepoint": ""}
    data = json.dumps({"format": 2, "uid": "u", "max_parallelism": 1, "origin": origin}).encode()

    with pytest.raises(CorruptDataError, match=r"job\.json cannot be read"):
        decode_job(data, "job.json")


def test_release_spares_other_savepoints(family: Family) -> None:
    """I11: only what is the fork's own is released; savepoints of others stay, whatever their names begin with."""
    family.fork()
    family.fork("other")
    family.jobs("job").make_savepoint("fork-hold-mine", None)
    family.go_on("fork")

    assert len(family.jobs("job").savepoints.names("fork-hold-")) == 2
    assert family.missing("other") == set()
