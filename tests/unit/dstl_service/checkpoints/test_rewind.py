"""
Rewinds of a job: where it continues, who is fenced, and what is kept.

A failure means that a rewound job could continue from what was given up, or lose what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

import pytest

from dstl_service.checkpoints.rewind import RewindReport, describe_rewind, rewind
from dstl_service.cli import main
from dstl_service.collection.job_deletion import delete_job
from dstl_service.collection.retention import retained_manifests
from dstl_service.collection.subsumed_deletion import delete_subsumed
from dstl_service.formats.keys import epoch_key
from dstl_service.formats.manifest import Manifest, ManifestKind
from dstl_service.registry.job_store import JobStore
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from dstl_service.wire import (
    CLOSED_SINK,
    REMOVED,
    SET_ASIDE,
    SINK,
    CheckpointRef,
    FormerSlots,
    OperatorInfo,
    RowsSetAside,
)
from storage.errors import FencedError, InvalidInputError, NotFoundError
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.object_store import ObjectStore, exists
from storage.open import open_store
from storage.testing import FakeClock, FakeIds, RecordingStore
from tests.unit.dstl_service.interleaving import Killed, PausingStore, kill
from tests.unit.dstl_service.samples import manifest, opened


class QueryDriver:
    """A query's driver, with a service process of its own."""

    def __init__(self, store: ObjectStore, host: int) -> None:
        self.jobs = opened(store, host)
        self.uids = ""
        self.epoch, self.latest = self.jobs.claim("driver")

    def request(self) -> Manifest:
        """Return the next checkpoint to complete."""
        checkpoint_id = self.latest.id + 1 if self.latest else 0
        base = self.latest.ref if self.latest else None
        uid = f"{self.uids}e{self.epoch}c{checkpoint_id}"
        kind = ManifestKind.COMPLETE if checkpoint_id % 3 == 0 else ManifestKind.DELTA
        return manifest(checkpoint_id, self.epoch, base, uid=uid, job_uid=self.jobs.job_uid, kind=kind)

    def complete(self) -> Manifest:
        """Complete the next checkpoint."""
        self.latest, _ = self.jobs.create_manifest(self.request())
        return self.latest


@pytest.fixture
def store() -> MemoryStore:
    """Return the store of the test's job."""
    return MemoryStore()


def driver_of(store: ObjectStore, checkpoints: int, host: int = 1) -> QueryDriver:
    driver = QueryDriver(store, host)
    for _ in range(checkpoints):
        driver.complete()
    return driver


class Options(TypedDict, total=False):
    """Return the options of a rewind."""

    savepoint: str
    checkpoint_id: int
    checkpoints_max: int
    write: bool


def set_back(store: ObjectStore, host: int = 90, **options: Unpack[Options]) -> RewindReport:
    options.setdefault("write", True)
    return rewind(opened(store, host), "job", FakeIds(host), **options)


def newest_id(store: ObjectStore, host: int = 80) -> tuple[int, int]:
    newest = opened(store, host).newest()
    assert newest is not None
    return newest.id, newest.generation


def test_job_stands_where_it_is_set_back_to(store: MemoryStore) -> None:
    """The next driver continues from the savepoint, whose checkpoint has been deleted; the rest becomes a savepoint."""
    driver = driver_of(store, 3)
    driver.jobs.make_savepoint("before", 1)
    for _ in range(4):
        driver.complete()
    driver.jobs.delete_manifests([found.ref for found in driver.jobs.manifests() if found.id < 3])

    report = set_back(store, savepoint="before")

    assert (report.is_written, report.given_up) == (True, 4)
    follower = QueryDriver(store, 2)
    assert follower.latest is not None
    assert (follower.latest.id, follower.latest.rewound_from) == (1, driver.latest.ref if driver.latest else None)
    assert [follower.complete().id for _ in range(6)] == [2, 3, 4, 5, 6, 7]
    kept = opened(store, 3).savepoints.load(report.savepoint)
    assert kept.ref == driver.latest.ref if driver.latest else None


def test_dry_run_changes_nothing(store: MemoryStore) -> None:
    """A rewind without the option to write only reports what it would do."""
    driver_of(store, 3)
    before = [info.key for info in store.list("")]

    report = set_back(store, checkpoint_id=1, write=False)

    assert (report.is_written, report.given_up, report.epoch) == (False, 1, 0)
    assert [info.key for info in store.list("")] == before


def test_published_output_that_stays_is_told(store: MemoryStore) -> None:
    """Output that sinks have published after the target cannot be taken back."""
    driver = QueryDriver(store, 1)
    for _ in range(3):
        driver.complete()
    sinks = (
        OperatorInfo("late", 1, "", {}, kind=SINK, published=2),
        OperatorInfo("early", 1, "", {}, kind=SINK, published=1),
        OperatorInfo("new", 1, "", {}, kind=SINK),
    )
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=sinks))

    report = rewind(driver.jobs, "job", FakeIds(), checkpoint_id=1)

    assert report.published == {"late": 2}
    told = describe_rewind(report)
    assert "; sink late has published output up to checkpoint 2 at least, and maybe up to 3, which stays" in told
    for sink in ("early", "new"):  # the newest checkpoint does not know of its own output
        assert f"; sink {sink} may have published output of checkpoints 2 to 3, which stays" in told


def test_sink_has_the_slots_of_before_and_after(store: MemoryStore) -> None:
    """The next driver publishes them all once: so one from before the rewind is fenced in each of them."""
    driver = QueryDriver(store, 1)
    former: FormerSlots | None = None
    for few, many in ((2, 3), (2, 3), (4, 1)):
        sinks = (
            OperatorInfo("few", few, "", {}, kind=SINK),
            OperatorInfo("many", many, "", {}, kind=CLOSED_SINK, published=0),
            OperatorInfo("table", few, "", {}),
            OperatorInfo("former", few, "", {}, kind=SINK, former_slots=former),
        )
        driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=sinks))
        former = FormerSlots(5, driver.latest.ref)

    set_back(store, checkpoint_id=1)

    newest = opened(store, 80).newest()
    assert newest is not None
    assert {item.name: item.parallelism for item in newest.operators} == {
        "few": 4,
        "many": 3,
        "table": 2,
        "former": 5,
    }


def test_sink_that_the_target_does_not_know_keeps_its_slots(store: MemoryStore) -> None:
    """The next query may have it with fewer slots: a driver from before the rewind is fenced in the others, too."""
    driver, table = QueryDriver(store, 1), OperatorInfo("table", 2, "", {})
    sinks = (
        OperatorInfo("output", 4, "", {}, kind=SINK, published=0),
        OperatorInfo("former", 3, "", {}, kind=CLOSED_SINK, published=2),
        OperatorInfo("table.set-aside", 2, "", {}, kind=SINK),
    )
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(table,)))
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(table, *sinks)))
    given_up = [driver.latest.ref]

    for host in (90, 91):
        set_back(store, host=host, checkpoint_id=0)

        newest = opened(store, 80).newest()
        assert newest is not None
        # Nothing of them is published or given up, for their ids come again; a name that a table needs is left to it.
        closed = [replace(sink, kind=CLOSED_SINK, published=None, recent=given_up) for sink in sinks[:2]]
        assert newest.operators == (table, *closed)
        assert check_job(store, "job").problems == []
        again = QueryDriver(store, host)
        again.latest, _ = again.jobs.create_manifest(replace(again.request(), operators=newest.operators))
        given_up = [*given_up, again.latest.ref]

    set_back(store, host=92, savepoint=f"before-rewind-{given_up[0].to_text()}")
    newest = opened(store, 80).newest()
    assert newest is not None
    assert newest.operators[1:3] == (replace(sinks[0], recent=given_up), replace(sinks[1], recent=given_up))


def test_sink_knows_the_checkpoints_that_are_given_up(store: MemoryStore) -> None:
    """It may have published them; a marker of another one under such an id is of a storage that was set back."""
    driver, refs = QueryDriver(store, 1), list[CheckpointRef]()
    for checkpoint_id in range(4):
        recent = [ref for ref in refs if ref.id >= checkpoint_id - 2]
        sink = OperatorInfo("output", 2, "", {}, kind=SINK, recent=recent)
        driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(sink,)))
        refs.append(driver.latest.ref)

    set_back(store, checkpoint_id=2)

    newest = opened(store, 80).newest()
    assert newest is not None
    assert [item.recent for item in newest.operators] == [refs[1:]]
    assert newest.rewound_from == refs[3]


def test_older_driver_is_fenced(store: MemoryStore) -> None:
    """I4: the previous driver completes nothing more, and its repeated requests bring nothing back."""
    driver = driver_of(store, 2)
    lost = driver.request()
    driver.complete()

    report = set_back(store, checkpoint_id=0)

    with pytest.raises(FencedError):
        driver.jobs.create_manifest(driver.request())
    # Its answer was lost: the checkpoint does exist.
    assert driver.jobs.create_manifest(lost)[0].ref.to_text() == report.newest
    with pytest.raises(FencedError):
        driver.jobs.create_manifest(driver.request())
    assert newest_id(store)[0] == 0


def test_driver_of_a_deleted_job_takes_nobody_over(store: MemoryStore) -> None:
    """I4: late puts of a paused driver lie where no new job of the name looks, and do not block that job."""
    old = driver_of(store, 3)
    late = old.request()
    delete_job(store, "job", write=True)
    new = driver_of(store, 1, host=2)
    old.jobs.create_manifest(late)

    assert QueryDriver(store, 4).latest == new.latest
    with pytest.raises(FencedError):
        new.complete()


def test_garbage_collection_by_hand_ends_a_rewind(tmp_path: Path) -> None:
    """`dstl gc --delete` after a killed rewind keeps everything that belongs to the job, including the fence."""
    store = open_store(f"file://{tmp_path}")
    driver_of(store, 3)
    paused = PausingStore(store)
    paused.pause_at("put", "job/checkpoints/*", kill)
    with pytest.raises(Killed):
        rewind(opened(paused, 90), "job", FakeIds(90), checkpoint_id=1, write=True)

    assert main(["gc", "--storage", store.url, "--delete", "job"]) == 0
    assert newest_id(store)[0] == 1
    assert check_job(store, "job").problems == []


@pytest.mark.parametrize("checkpoints", range(5))
def test_older_drivers_are_fenced_by_each_other(store: MemoryStore, checkpoints: int) -> None:
    """I4: a driver is fenced at its next write, although fences from before the rewind have higher ids."""
    driver_of(store, 4)
    set_back(store, checkpoint_id=0)
    older = driver_of(store, checkpoints, host=2)

    newer = QueryDriver(store, 3)
    with pytest.raises(FencedError):
        older.jobs.create_manifest(older.request())
    assert newer.latest == older.latest
    assert newer.complete().id == checkpoints + 1
    assert opened(store, 4).frontier() == (newer.latest, newer.epoch)


def test_other_process_forgets_what_was_given_up(store: MemoryStore) -> None:
    """A process that cached the earlier checkpoints sees those that reuse their ids."""
    driver_of(store, 4)
    watcher = opened(store, 5)
    before = list(watcher.completed())
    set_back(store, checkpoint_id=1)
    driver = driver_of(store, 2, host=2)

    assert watcher.newest() == driver.latest
    assert watcher.newest_of(2) != before[2]
    assert driver.latest is not None
    assert watcher.resolve(driver.latest.ref) == driver.latest
    assert before[3] not in list(watcher.completed())


def test_job_is_set_forward_again(store: MemoryStore) -> None:
    """The state before the rewind is a savepoint, to which the job can be rewound again."""
    driver = driver_of(store, 5)
    first = set_back(store, checkpoint_id=1)
    driver_of(store, 1, host=2)

    set_back(store, host=91, savepoint=first.savepoint)

    follower = QueryDriver(store, 3)
    assert follower.latest is not None
    assert driver.latest is not None
    assert (follower.latest.id, follower.latest.segments) == (driver.latest.id, driver.latest.segments)
    assert follower.complete().id == 5


def test_job_is_set_back_again_within_a_minute(store: MemoryStore) -> None:
    """Uids of the same time share a prefix; two rewinds that give up the same id keep both under different names."""
    reports = []
    for host in (1, 2):
        driver = QueryDriver(store, host)
        driver.uids = "0192f3a4b5c6"
        for _ in range(4 if driver.latest is None else 2):
            driver.complete()
        reports.append(set_back(store, host=90 + host, checkpoint_id=1))

    assert [CheckpointRef.parse(report.newest).id for report in reports] == [3, 3]
    saved = opened(store, 4).savepoints
    assert [saved.load(report.savepoint).ref.to_text() for report in reports] == [report.newest for report in reports]
    assert QueryDriver(store, 5).complete().id == 2


def test_completed_meanwhile_is_kept(store: MemoryStore) -> None:
    """A checkpoint that completes after the rewind was decided is not lost: the savepoint is of that one."""
    driver = driver_of(store, 3)
    stepping = PausingStore(store)
    stepping.pause_at("put", "job/epochs/*", driver.complete)

    report = rewind(opened(stepping, 90), "job", FakeIds(90), checkpoint_id=1, write=True)

    assert driver.latest is not None
    assert (driver.latest.id, report.newest) == (3, driver.latest.ref.to_text())
    assert opened(store, 91).savepoints.load(report.savepoint).ref == driver.latest.ref
    with pytest.raises(FencedError):
        driver.complete()


def test_only_retained_checkpoints(store: MemoryStore) -> None:
    """I11: a checkpoint that is stored but no longer retained is not a target of a rewind: its deletion is due."""
    driver_of(store, 20)

    with pytest.raises(NotFoundError, match="not retained"):
        set_back(store, checkpoint_id=1, checkpoints_max=2)
    assert set_back(store, checkpoint_id=18, checkpoints_max=2).is_written


def test_nothing_under_way_is_taken_over(store: MemoryStore) -> None:
    """The target of a rewind is named by a savepoint until it is the newest checkpoint, and by none after that."""
    driver_of(store, 4)
    recorded = RecordingStore(store)

    set_back(recorded, checkpoint_id=1)

    held = "job/savepoints/rewind-to-*"
    assert [recorded.count(operation, held) for operation in ("put", "delete")] == [1, 1]
    assert [name for name in opened(store).savepoints.names() if name.startswith("rewind")] == []


def test_registry_is_sound_after_it(store: MemoryStore) -> None:
    """I10: after a rewind, fsck finds no defect, and a rebuild reports no loss."""
    driver_of(store, 4)
    set_back(store, checkpoint_id=1)
    driver_of(store, 1, host=2)

    problems = [problem for problem in check_job(store, "job").problems if "segments/" not in problem]
    assert problems == []
    assert rebuild_registry(store, "job", FakeClock(), FakeIds(9)).registry_problems == []


def test_target_that_was_deleted_by_hand(store: MemoryStore) -> None:
    """A rewind whose savepoint is deleted meanwhile says how to continue, and then succeeds."""
    driver_of(store, 5)
    paused = PausingStore(store)
    paused.pause_at("put", "job/checkpoints/*", kill)
    with pytest.raises(Killed):
        rewind(opened(paused, 90), "job", FakeIds(90), checkpoint_id=1, write=True)
    (pin,) = opened(store).savepoints.names()
    opened(store).savepoints.delete(pin)

    with pytest.raises(NotFoundError, match=f"--create {pin} --checkpoint 1"):
        QueryDriver(store, 91)
    opened(store, 92).make_savepoint(pin, 1)

    assert QueryDriver(store, 93).complete().id == 2


def run_on(store: ObjectStore) -> None:
    """Start a driver that completes many checkpoints, so that all earlier ones are subsumed and deleted."""
    driver_of(store, 30, host=21)
    sweep(store)


def sweep(store: ObjectStore) -> None:
    """Delete all unneeded manifests, as a coordinator or a collector does."""
    jobs = opened(store, 70)
    epoch = jobs.settled_epoch()
    delete_subsumed(store, jobs, [], [found.ref for found in retained_manifests(jobs, 2)], epoch)


def complete_or_be_fenced(driver: QueryDriver) -> None:
    with suppress(FencedError):
        driver.complete()


def rewind_to_2(store: ObjectStore) -> None:
    """Rewind the job to checkpoint 2, if that is still part of it."""
    with suppress(NotFoundError):
        set_back(store, host=22, checkpoint_id=2)


MEANWHILE: dict[str, Callable[[ObjectStore, QueryDriver], object]] = {
    "it is killed": lambda _, __: kill(),
    "the driver completes": lambda _, driver: complete_or_be_fenced(driver),
    "another driver starts": lambda store, _: QueryDriver(store, 20),
    "another driver runs on": lambda store, _: run_on(store),
    "garbage is collected": lambda store, _: sweep(store),
    "another rewind": lambda store, _: rewind_to_2(store),
    "another rewind, and a driver": lambda store, _: (
        rewind_to_2(store),
        driver_of(store, 3, host=23),
    ),
}
MAY_BE_FIRST = ("another driver runs on", "garbage is collected", "another rewind", "another rewind, and a driver")


@pytest.mark.parametrize("name", MEANWHILE)
def test_whatever_happens_meanwhile(name: str) -> None:
    """I3, I4: any event before any one store call of a rewind leaves the job whole, and fenced writers are told."""
    call = 0
    while paused_rewind(name, call):
        call += 1
    assert call > 15


def paused_rewind(name: str, call: int) -> bool:
    """Let an event happen before one store call of a rewind, and check the job; tell whether there is such a call."""
    store, report = MemoryStore(), None
    driver = driver_of(store, 5)
    paused = PausingStore(store)
    paused.pause_before(call, lambda: MEANWHILE[name](store, driver))
    try:
        report = rewind(opened(paused, 90), "job", FakeIds(90), checkpoint_id=1, write=True)
    except Killed:
        assert name == "it is killed"
    except (NotFoundError, InvalidInputError):  # the target was subsumed, or the job is already there
        assert name in MAY_BE_FIRST
    is_decided = exists(store, epoch_key("job", 2))
    follower = QueryDriver(store, 92)
    if name == "it is killed" and follower.latest is not None:
        assert (follower.latest.id, follower.latest.rewound_from is not None) == (
            (1, True) if is_decided else (4, False)
        )
    with pytest.raises(FencedError):
        driver.complete()
    check_whole(store, follower)
    if report is not None:
        assert opened(store, 91).savepoints.load(report.savepoint).ref.to_text() == report.newest
        if name not in MAY_BE_FIRST:
            assert follower.latest is not None
            assert (follower.latest.id, follower.latest.rewound_from) == (1, CheckpointRef.parse(report.newest))
            assert opened(store, 97).savepoints.names() == [report.savepoint]
    assert follower.complete() == opened(store, 94).newest()
    return paused.calls > call


def check_whole(store: ObjectStore, follower: QueryDriver) -> None:
    """Check that each listed checkpoint can be restored, and that a driver continues from the last."""
    jobs = opened(store, 93)
    listed = list(jobs.completed())
    assert listed[-1] == follower.latest
    for found in retained_manifests(jobs, 2):
        assert jobs.state(found.ref).log == []


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
def test_impossible_rewind_is_refused(store: MemoryStore, options: Options, error: type[Exception]) -> None:
    """A rewind with an unclear target writes nothing."""
    driver_of(store, 3)
    before = [info.key for info in store.list("")]

    with pytest.raises(error):
        set_back(store, **options)
    assert [info.key for info in store.list("")] == before


def test_job_without_checkpoints(store: MemoryStore) -> None:
    """A job without checkpoints cannot be rewound."""
    JobStore(store, "job", FakeClock(), FakeIds()).open(None)

    with pytest.raises(NotFoundError, match="has no checkpoint"):
        set_back(store, checkpoint_id=0)


def test_offsets_are_beside_state_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The offsets up to which output is published are those of the checkpoint that a sink names."""
    entry = 'v1\n{"batchWatermarkMs":0}\n{"in":{"0":7,"1":3}}\n-\n{"logOffset":2}'
    store = LocalStore(tmp_path)
    driver = QueryDriver(store, 1)
    driver.complete()
    sink = OperatorInfo("output", 1, "", {}, kind=SINK, published=0)
    driver.jobs.create_manifest(replace(driver.request(), operators=(sink,), offsets=entry))

    assert main(["checkpoints", "--storage", store.url, "--json", "job"]) == 0
    newest = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert newest["published"] == {"output": 0}
    assert newest["sources"] == [{"in": {"0": 7, "1": 3}}, None, {"logOffset": 2}]
    assert main(["checkpoints", "--storage", store.url, "job"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith('output<=0  {"in":{"0":7,"1":3}} null {"logOffset":2}')


def test_changed_operators_are_beside_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An administrator sees how a query calls an operator, asks for its parallelism by that name, and what is gone."""
    store = LocalStore(tmp_path)
    driver = QueryDriver(store, 1)
    operators = (
        OperatorInfo("old", 2, "", {}, called="new", renamed_from="old"),
        OperatorInfo("gone", 2, "", {}, kind=REMOVED),
        OperatorInfo("gone.set-aside", 2, "", {}, kind=REMOVED),
    )
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=operators))

    assert main(["checkpoints", "--storage", store.url, "--json", "job"]) == 0
    newest = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (newest["renamed"], newest["removed"]) == ({"old": "new"}, ["gone"])
    assert main(["checkpoints", "--storage", store.url, "job"]) == 0
    assert "  renamed old->new  removed gone" in capsys.readouterr().out
    assert driver.jobs.request_parallelism("new", 3)[1]["new"].parallelism == 3
    with pytest.raises(NotFoundError, match="no operator 'old'; its newest checkpoint has: new"):
        driver.jobs.request_parallelism("old", 3)


def test_rows_set_aside_are_those_of_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a rewind the rows wait that waited then, whatever has run or was given up since."""
    store = LocalStore(tmp_path)
    driver = QueryDriver(store, 1)
    waiting = OperatorInfo("op.rows", 2, "", {}, kind=SET_ASIDE, set_aside=[RowsSetAside(0, 0, 9, 5, 70)])
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(waiting,)))
    lost = replace(waiting, set_aside=[RowsSetAside(0, 0, 9, 5, 70, is_lost=True)])
    for operator in (lost, replace(waiting, set_aside=[])):
        driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(operator,)))

    set_back(store, checkpoint_id=0)

    newest = opened(store, 2).newest()
    assert newest is not None
    assert newest.operators == (waiting,)
    assert main(["checkpoints", "--storage", store.url, "job"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("5 rows set aside")
    assert main(["checkpoints", "--storage", store.url, "--json", "job"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["set_aside"] == {"rows": 5, "lost": 0}


def test_losses_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I17: each batch and partition with lost rows has a line; rows that wait to be run have none."""
    store = LocalStore(tmp_path)
    driver = QueryDriver(store, 1)
    parts = [RowsSetAside(3, 64, 127, 5, 70, is_lost=True), RowsSetAside(3, 64, 127, 0, 0)]
    companion = OperatorInfo("op.set-aside", 2, "", {}, kind=SET_ASIDE, set_aside=parts)
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(companion,)))

    assert main(["losses", "--storage", store.url, "job"]) == 0
    line = "operator=op  batch=3  key_groups=00064-00127  partition=1  rows=5  bytes=70"
    assert capsys.readouterr().out.splitlines() == [line]
    assert main(["losses", "--storage", store.url, "--json", "job"]) == 0
    (document,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (document["operator"], document["batch"], document["rows"]) == ("op", 3, 5)
    rescaled = replace(companion, parallelism=8)
    driver.latest, _ = driver.jobs.create_manifest(replace(driver.request(), operators=(rescaled,)))
    assert main(["losses", "--storage", store.url, "job"]) == 0
    assert capsys.readouterr().out.splitlines() == [line.replace("partition=1", "partition=-")], "it is of another one"
