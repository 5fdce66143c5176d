"""
A job that is set back: where it stands then, who is fenced, and what is kept.

A failure means that a job that was set back could come to stand behind what was given up, or lose what it needs.
"""

from __future__ import annotations

import pytest

from dstl_service.fsck import check_job
from dstl_service.job_store import JobStore
from dstl_service.manifest import Manifest, ManifestKind
from dstl_service.rebuild import rebuild_registry
from dstl_service.rewind import RewindReport, rewind
from storage.errors import ConflictError, FencedError, InvalidInputError, NotFoundError, UnavailableError
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore
from tests.unit.dstl_service.samples import manifest, opened


class Driver:
    """A query's driver, with a service process of its own."""

    def __init__(self, store: ObjectStore, host: int) -> None:
        self.jobs = opened(store, host)
        self.epoch, self.latest = self.jobs.claim("driver")

    def request(self) -> Manifest:
        """Return what the next checkpoint is going to be."""
        checkpoint_id = self.latest.id + 1 if self.latest else 0
        base = self.latest.ref if self.latest else None
        uid = f"e{self.epoch}c{checkpoint_id}"
        kind = ManifestKind.COMPLETE if checkpoint_id % 3 == 0 else ManifestKind.DELTA
        return manifest(checkpoint_id, self.epoch, base, uid=uid, job_uid=self.jobs.job_uid, kind=kind)

    def complete(self) -> Manifest:
        """Make the next checkpoint exist."""
        self.latest, _ = self.jobs.create(self.request())
        return self.latest


@pytest.fixture
def store() -> MemoryStore:
    """Return the store of the test's job."""
    return MemoryStore()


def driver_of(store: ObjectStore, checkpoints: int, host: int = 1) -> Driver:
    driver = Driver(store, host)
    for _ in range(checkpoints):
        driver.complete()
    return driver


def set_back(store: ObjectStore, host: int = 90, **options: object) -> RewindReport:
    return rewind(opened(store, host), "job", FakeClock(), FakeIds(host), **{"write": True, **options})  # type: ignore[arg-type]


def newest_id(store: ObjectStore, host: int = 80) -> tuple[int, int]:
    newest = opened(store, host).newest()
    assert newest is not None
    return newest.id, newest.generation


def test_job_stands_where_it_is_set_back_to(store: MemoryStore) -> None:
    """The next driver goes on from the savepoint, whose checkpoint was deleted meanwhile; the rest is a savepoint."""
    driver = driver_of(store, 3)
    driver.jobs.make_savepoint("before", 1)
    for _ in range(4):
        driver.complete()
    driver.jobs.delete_manifests([found.ref for found in driver.jobs.manifests() if found.id < 3])

    report = set_back(store, savepoint="before")

    assert (report.is_written, report.given_up) == (True, 4)
    follower = Driver(store, 2)
    assert follower.latest is not None
    assert (follower.latest.id, follower.latest.rewound_from) == (1, driver.latest.ref if driver.latest else None)
    assert [follower.complete().id for _ in range(6)] == [2, 3, 4, 5, 6, 7]
    kept = opened(store, 3).savepoints.load(report.savepoint)
    assert kept.ref == driver.latest.ref if driver.latest else None


def test_dry_run_changes_nothing(store: MemoryStore) -> None:
    """Without being told to write, it says what it would do."""
    driver_of(store, 3)
    before = [info.key for info in store.list("")]

    report = set_back(store, checkpoint_id=1, write=False)

    assert (report.is_written, report.given_up, report.epoch) == (False, 1, 0)
    assert [info.key for info in store.list("")] == before


def test_older_driver_is_fenced(store: MemoryStore) -> None:
    """I4: the driver that ran before can neither complete a further checkpoint, nor one that was given up again."""
    driver = driver_of(store, 2)
    lost = driver.request()
    driver.complete()

    set_back(store, checkpoint_id=0)

    with pytest.raises(FencedError):
        driver.jobs.create(driver.request())
    with pytest.raises(FencedError):
        driver.jobs.create(lost)  # its answer was lost, and it is asked for again
    assert newest_id(store) == (0, 2)


@pytest.mark.parametrize("checkpoints", range(5))
def test_drivers_behind_are_fenced_by_each_other(store: MemoryStore, checkpoints: int) -> None:
    """I4: a driver is fenced where it writes next, though fences of the time before stand further on."""
    driver_of(store, 4)
    set_back(store, checkpoint_id=0)
    older = driver_of(store, checkpoints, host=2)

    newer = Driver(store, 3)
    with pytest.raises(FencedError):
        older.jobs.create(older.request())
    assert newer.latest == older.latest
    assert newer.complete().id == checkpoints + 1
    assert opened(store, 4).frontier() == (newer.latest, newer.epoch)


def test_other_process_forgets_what_was_given_up(store: MemoryStore) -> None:
    """A process that has seen the checkpoints before sees those that took their ids."""
    driver_of(store, 4)
    watcher = opened(store, 5)
    before = list(watcher.completed())
    set_back(store, checkpoint_id=1)
    driver = driver_of(store, 2, host=2)

    assert watcher.newest() == driver.latest
    assert watcher.newest_of(2) != before[2]
    assert driver.latest is not None
    assert watcher.resolve(driver.latest.ref) == driver.latest
    with pytest.raises(NotFoundError):
        watcher.resolve(before[3].ref)


def test_job_is_set_forward_again(store: MemoryStore) -> None:
    """What it was set back from is one more savepoint to set it to."""
    driver = driver_of(store, 5)
    first = set_back(store, checkpoint_id=1)
    driver_of(store, 1, host=2)

    set_back(store, host=91, savepoint=first.savepoint)

    follower = Driver(store, 3)
    assert follower.latest is not None
    assert driver.latest is not None
    assert (follower.latest.id, follower.latest.segments) == (driver.latest.id, driver.latest.segments)
    assert follower.complete().id == 5


@pytest.mark.parametrize("failing", range(1, 8))
def test_interrupted_rewind_is_repeated(failing: int) -> None:
    """I3: wherever a rewind ends before its time, the job stands at a whole checkpoint, and the next one does it."""
    inner = MemoryStore()
    driver_of(inner, 4)
    store = FaultyStore(inner, Fault("put", FaultKind.FAIL_BEFORE, skip=failing - 1))
    try:
        set_back(store, checkpoint_id=1)
    except UnavailableError:
        jobs = opened(inner, 6)
        newest = jobs.newest()
        assert newest is not None
        jobs.state(newest.ref)
        if newest_id(inner) != (1, 1):
            set_back(inner, host=92, checkpoint_id=1)

    assert Driver(inner, 7).complete().id == 2


def test_running_query_is_noticed(store: MemoryStore) -> None:
    """A checkpoint that is completed meanwhile is not lost: the rewind stops, and says what to do."""
    driver = driver_of(store, 3)
    jobs = opened(store, 90)
    make_savepoint = jobs.make_savepoint

    def late(name: str, checkpoint_id: int | None) -> Manifest:
        made = make_savepoint(name, checkpoint_id)
        driver.complete()
        return made

    jobs.make_savepoint = late  # type: ignore[method-assign]
    with pytest.raises(ConflictError, match="repeat"):
        rewind(jobs, "job", FakeClock(), FakeIds(90), checkpoint_id=1, write=True)

    assert newest_id(store) == (3, 0)
    assert set_back(store, host=91, checkpoint_id=1).given_up == 2


@pytest.mark.parametrize("moment", ["create", "give_up"])
def test_query_that_is_started_meanwhile_is_noticed(store: MemoryStore, moment: str) -> None:
    """A driver that may have seen what is given up makes the rewind fail; repeated, it holds."""
    driver_of(store, 4)
    jobs = opened(store, 90)
    before = getattr(jobs, moment)

    def late(*arguments: object) -> object:
        Driver(store, 2)
        return before(*arguments)

    setattr(jobs, moment, late)
    with pytest.raises(FencedError):
        rewind(jobs, "job", FakeClock(), FakeIds(90), checkpoint_id=1, write=True)

    savepoint = next(name for name, _ in opened(store, 95).savepoints.all())
    assert savepoint.startswith("before-rewind-3-")
    if newest_id(store)[0] != 1:
        set_back(store, host=91, checkpoint_id=1)
    assert Driver(store, 3).complete().id == 2


def test_registry_is_sound_behind_it(store: MemoryStore) -> None:
    """I10: fsck finds nothing, and a rebuild sees that nothing is lost."""
    driver_of(store, 4)
    set_back(store, checkpoint_id=1)
    driver_of(store, 1, host=2)

    problems = [problem for problem in check_job(store, "job").problems if "segments/" not in problem]
    assert problems == []
    assert rebuild_registry(store, "job", FakeClock(), FakeIds(9)).registry_problems == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidInputError),
        ({"savepoint": "s", "checkpoint_id": 1}, InvalidInputError),
        ({"checkpoint_id": 2}, InvalidInputError),
        ({"checkpoint_id": 9}, NotFoundError),
        ({"savepoint": "none"}, NotFoundError),
    ],
)
def test_impossible_rewind_is_refused(store: MemoryStore, options: dict[str, object], error: type[Exception]) -> None:
    """Nothing is written where it is not clear what to set the job back to."""
    driver_of(store, 3)
    before = [info.key for info in store.list("")]

    with pytest.raises(error):
        set_back(store, **options)
    assert [info.key for info in store.list("")] == before


def test_job_without_checkpoints(store: MemoryStore) -> None:
    """There is nothing to set back."""
    JobStore(store, "job", FakeClock(), FakeIds()).open(None)

    with pytest.raises(NotFoundError, match="has no checkpoint"):
        set_back(store, checkpoint_id=0)
