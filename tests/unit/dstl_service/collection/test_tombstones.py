"""A deleted job can be brought back for a time and is gone afterwards, whichever process pauses or dies in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstl_service import cli
from dstl_service.collection.tombstones import Deletions
from dstl_service.formats.keys import encode_job
from dstl_service.registry.job_store import JobStore
from storage.errors import ConflictError, NotFoundError, UnavailableError
from storage.local_store import LocalStore
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore
from storage.validation import NUMBER_MAX
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.interleaving import Killed, PausingStore, kill
from tests.waiting import wait_until

OF_A_FENCE = 3
"""Objects with which a collector fences owners: an epoch's record, a hint of it, and a fence."""


class TwoDeleters:
    """A store with a job, and its deletions as seen by two processes."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        for key in ("job/job.json", "jobs/job.json"):
            self.store.put(key, encode_job("uid", 128))
        self.store.put("job/segments/h/1.seg", b"x")
        self.one, self.other = (Deletions(self.store, self.clock, FakeIds(host)) for host in (1, 2))

    def keys(self, prefix: str = "job/") -> list[str]:
        """Return the stored keys."""
        return [info.key for info in self.store.list(prefix)]


@pytest.fixture
def deleters() -> TwoDeleters:
    """Return the two processes."""
    return TwoDeleters()


def test_deleted_job_is_not_opened_and_can_be_brought_back(deleters: TwoDeleters) -> None:
    """Nothing of a deleted job is removed before its time is over, and other jobs are not affected."""
    before = deleters.keys()
    deleters.one.bury("job", "ann", 60)
    with pytest.raises(ConflictError, match=r"deleted by ann at .*dstl undelete"):
        deleters.other.check("job")
    deleters.other.check("jobs")
    assert deleters.other.collect_expired() == []
    deleters.other.undo("job")

    deleters.one.check("job")
    assert deleters.keys() == before
    assert list(deleters.one.all(pytest.fail)) == []


def test_clock_that_is_ahead_takes_no_time_from_an_undo(deleters: TwoDeleters) -> None:
    """I11: a collector whose clock is a year ahead deletes nothing that can still be undone."""
    ahead = FakeClock()
    ahead.advance(365 * 24 * 3_600_000)
    collector = Deletions(deleters.store, ahead, FakeIds(3))
    deleters.one.bury("job", "ann", 60)
    for _ in range(2):
        deleters.clock.advance(29_999)
        assert collector.collect_expired() == []
    assert deleters.keys("probe/") == []
    deleters.clock.advance(2)
    assert [removal.job for removal in collector.collect_expired()] == ["job"]


def test_deleted_job_is_collected_when_its_time_is_over(deleters: TwoDeleters) -> None:
    """The whole job is removed and its name is free again; a job whose name shares a prefix stays."""
    deleters.one.bury("job", "ann", 60)
    deleters.clock.advance(60_000)

    assert [removal.objects for removal in deleters.other.collect_expired()] == [2 + OF_A_FENCE]
    assert deleters.keys() == []
    assert deleters.keys("jobs/") == ["jobs/job.json"]
    deleters.one.check("job")
    with pytest.raises(NotFoundError):
        deleters.one.undo("job")


def test_first_deletion_counts(deleters: TwoDeleters) -> None:
    """Deleting a deleted job changes neither its end nor its author."""
    first = deleters.one.bury("job", "ann", 60)
    deleters.clock.advance(10_000)

    assert deleters.other.bury("job", "bob", 6_000) == first


def test_what_was_brought_back_is_not_collected_by_who_slept(deleters: TwoDeleters) -> None:
    """I11: a collector that paused after its look at the tombstone deletes no job that was brought back."""
    tombstone = deleters.one.bury("job", "ann", 0)
    deleters.other.undo("job")

    assert deleters.one.collect(tombstone) is None
    assert deleters.keys() != []


def test_what_is_brought_back_at_the_last_moment_is_not_collected(deleters: TwoDeleters) -> None:
    """I11: of a collector and a concurrent undelete, only the one that decides first acts."""
    tombstone = deleters.one.bury("job", "ann", 0)
    paused = PausingStore(deleters.store)
    paused.pause_at("put", "@fates/*", lambda: deleters.other.undo("job"))

    assert Deletions(paused, deleters.clock, FakeIds(3)).collect(tombstone) is None
    assert deleters.keys() == ["job/job.json", "job/segments/h/1.seg"]


def test_what_is_being_collected_cannot_be_brought_back(deleters: TwoDeleters) -> None:
    """A job that may be partly removed is never opened again; the next collector continues where one stopped."""
    faulty = FaultyStore(deleters.store)
    faulty.inject(Fault("delete", FaultKind.FAIL_BEFORE))
    tombstone = deleters.one.bury("job", "ann", 0)
    with pytest.raises(UnavailableError):
        Deletions(faulty, deleters.clock, FakeIds(3)).collect(tombstone)

    with pytest.raises(ConflictError, match="being deleted"):
        deleters.other.undo("job")
    with pytest.raises(ConflictError):
        deleters.other.check("job")
    assert [removal.job for removal in deleters.other.collect_expired()] == ["job"]
    assert deleters.keys() == []
    deleters.other.check("job")


@pytest.mark.parametrize("finisher", ["who brings back", "collector"])
def test_bringing_back_that_was_interrupted_is_finished(deleters: TwoDeleters, finisher: str) -> None:
    """A process that dies after the decision to undelete leaves a job that can be brought back, not collected."""
    faulty = FaultyStore(deleters.store)
    faulty.inject(Fault("delete", FaultKind.FAIL_BEFORE))
    tombstone = deleters.one.bury("job", "ann", 0)
    with pytest.raises(UnavailableError):
        Deletions(faulty, deleters.clock, FakeIds(3)).undo("job")

    if finisher == "collector":
        assert deleters.one.collect(tombstone) is None
    else:
        assert deleters.other.undo("job") == tombstone
    deleters.one.check("job")
    assert list(deleters.one.all(pytest.fail)) == []
    assert deleters.keys() == ["job/job.json", "job/segments/h/1.seg"]


@pytest.mark.parametrize("step", [("put", "@fates/*.*"), ("delete", "@deleted/*")])
def test_job_is_deleted_again_after_an_interrupted_bringing_back(deleters: TwoDeleters, step: tuple[str, str]) -> None:
    """I12: an acknowledged deletion ends in a collection, at whatever point an earlier undelete died."""
    deleters.one.bury("job", "ann", 60)
    paused = PausingStore(deleters.store)
    paused.pause_at(*step, kill)
    with pytest.raises(Killed):
        Deletions(paused, deleters.clock, FakeIds(3)).undo("job")
    assert deleters.other.bury("job", "bob", 60).who == "bob"
    deleters.clock.advance(60_000)

    assert [removal.job for removal in deleters.one.collect_expired()] == ["job"]
    assert deleters.keys() == deleters.keys("@deleted/") == []


def test_collector_finishes_a_bringing_back_that_was_interrupted(deleters: TwoDeleters) -> None:
    """A job whose undelete was decided does not stay closed because the process died."""
    deleters.one.bury("job", "ann", 60)
    paused = PausingStore(deleters.store)
    paused.pause_at("put", "@fates/*.*", kill)
    with pytest.raises(Killed):
        Deletions(paused, deleters.clock, FakeIds(3)).undo("job")
    deleters.clock.advance(60_000)

    assert deleters.other.collect_expired() == []
    deleters.one.check("job")
    assert deleters.keys() == ["job/job.json", "job/segments/h/1.seg"]


def test_bringing_back_late_undoes_no_later_deletion(deleters: TwoDeleters) -> None:
    """I4: an undelete that paused leaves a later deletion in effect."""
    deleters.one.bury("job", "ann", 60)
    paused = PausingStore(deleters.store)

    def bring_back_and_delete() -> None:
        deleters.one.undo("job")
        deleters.one.bury("job", "bob", 60)

    paused.pause_at("delete", "@deleted/*", bring_back_and_delete)
    Deletions(paused, deleters.clock, FakeIds(3)).undo("job")

    found = deleters.other.of("job")
    assert found is not None
    assert found.who == "bob"


@pytest.mark.parametrize("calls", range(8))
def test_deletion_that_comes_late_is_a_deletion(deleters: TwoDeleters, calls: int) -> None:
    """I4: a deletion holds although an earlier tombstone came and went before its own was put."""
    paused = PausingStore(deleters.store)

    came_before = []

    def delete_and_bring_back() -> None:
        came_before.append(deleters.one.bury("job", "ann", 60).who == "ann")
        deleters.one.undo("job")

    paused.pause_before(calls, delete_and_bring_back)
    buried = Deletions(paused, deleters.clock, FakeIds(3)).bury("job", "bob", 60)

    if buried.who == "bob" and came_before == [True]:
        assert deleters.other.of("job") == buried
    assert [found.uid for found in deleters.other.all(pytest.fail)] in ([buried.uid], [])


def test_job_is_brought_back_any_number_of_times(deleters: TwoDeleters) -> None:
    """Each deletion is independent: it can be undone and collected like the first one."""
    for number in range(5):
        assert deleters.one.bury("job", "ann", 60).number == number
        with pytest.raises(ConflictError):
            deleters.other.check("job")
        deleters.other.undo("job")
        deleters.one.check("job")
    deleters.one.bury("job", "ann", 0)
    deleters.other.collect_expired()

    assert list(deleters.one.all(pytest.fail)) == []
    assert deleters.keys() == []


def test_nothing_is_deleted_while_no_fence_can_be_set(deleters: TwoDeleters) -> None:
    """I4: a collector that cannot fence a job's owner deletes nothing; another one does it later."""
    faulty = FaultyStore(deleters.store, Fault("put", FaultKind.FAIL_BEFORE, "job/epochs/*"))
    tombstone = deleters.one.bury("job", "ann", 0)
    before = deleters.keys()
    with pytest.raises(UnavailableError):
        Deletions(faulty, deleters.clock, FakeIds(3)).collect(tombstone)

    assert deleters.keys() == before
    assert [removal.job for removal in deleters.other.collect_expired()] == ["job"]
    assert deleters.keys() == []


def test_job_that_cannot_be_collected_stops_no_other_one(deleters: TwoDeleters) -> None:
    """I12: a job with a damaged registry stays until its deletion is forced; others are collected."""
    deleters.store.put("job/job.json", b"damaged")
    for name in ("job", "jobs"):
        deleters.one.bury(name, "ann", 0)

    assert [removal.job for removal in deleters.other.collect_expired()] == ["jobs"]
    assert deleters.keys() == ["job/job.json", "job/segments/h/1.seg"]
    (tombstone,) = deleters.one.all(pytest.fail)
    assert deleters.one.collect(tombstone, although_damaged=True) is not None
    assert deleters.keys() == []


def test_unreadable_tombstone_stops_no_other_one(deleters: TwoDeleters, caplog: pytest.LogCaptureFixture) -> None:
    """I12: a job is collected although another job's tombstone is damaged; that tombstone is reported and stays."""
    damaged = ["@deleted/a.json", "@deleted/z.json"]
    deleters.one.bury("job", "ann", 60)
    deleters.store.put(
        damaged[0], deleters.store.get("@deleted/job.json").replace(b'"until_ms": ', b'"until_ms": "x", "x": ')
    )
    deleters.store.put(damaged[1], b"{")
    deleters.clock.advance(60_000)

    assert [removal.job for removal in deleters.other.collect_expired()] == ["job"]
    told = [vars(record)["error"] for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 2
    assert all(key in message for key, message in zip(damaged, told, strict=True))
    assert deleters.keys("@deleted/") == damaged


def test_delay_of_any_length_can_be_undone(deleters: TwoDeleters) -> None:
    """A time beyond what a tombstone can hold becomes the latest one that it can."""
    deleters.one.bury("job", "ann", 10**30)

    assert deleters.other.undo("job").until_ms == NUMBER_MAX


def test_jobs_are_listed_though_a_tombstone_is_damaged(run: Any, tmp_path: Path) -> None:
    """The command lists the jobs, then reports the damaged tombstone and fails."""
    run("delete", "--write")
    (tmp_path / "@deleted" / "a.json").write_bytes(b"{")

    code, out = run("jobs")
    assert (code, "was deleted by" in out) == (1, True)


def test_missing_job_is_not_deleted(deleters: TwoDeleters) -> None:
    """A name without a job gets no tombstone."""
    with pytest.raises(NotFoundError):
        deleters.one.bury("none", "ann", 60)


def test_collection_that_was_interrupted_at_its_end_is_finished(deleters: TwoDeleters) -> None:
    """If only the tombstone is left, taking over the collection frees the name."""
    tombstone = deleters.one.bury("job", "ann", 0)
    deleters.store.delete(["job/job.json", "job/segments/h/1.seg"])

    removal = deleters.one.collect(tombstone)
    assert removal is not None
    assert removal.objects == 0
    deleters.one.check("job")


def test_service_refuses_to_open_deleted_job() -> None:
    """A query of a deleted job does not start; it starts again once the job is back."""
    store = MemoryStore()
    deletions = Deletions(store, FakeClock(), FakeIds(1))
    with service(store) as life:
        life.open()
        deletions.bury("job", "ann", 60)
        refused = life.client.post(f"{life.path}/epochs", json={"owner": "test"})
        deletions.undo("job")

        assert refused.status_code == 409
        assert "dstl undelete" in refused.json()["message"]
        assert life.open()["epoch"] == 2


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command on a storage with one job and returns exit code and output."""
    with service(LocalStore(tmp_path)) as life:
        life.open()
        life.complete(0, None, life.append())
        wait_until(lambda: bool(list((tmp_path / "@audit" / "job").iterdir())), what="the record of the start")

    def command(*arguments: str) -> tuple[int, str]:
        code = cli.main([*arguments, "--storage", tmp_path.as_uri(), *(() if arguments[0] == "jobs" else ("job",))])
        written = capsys.readouterr()
        return code, written.out + written.err

    return command


def test_commands_delete_and_undelete(run: Any, tmp_path: Path) -> None:
    """The commands report what they do, refuse what they must, and are audited even when the job is gone."""
    assert "--write does it" in run("delete")[1]
    assert "can be undone until" in run("delete", "--write")[1]
    assert "was deleted by" in run("jobs")[1]
    assert "dstl undelete" in run("rewind", "--checkpoint", "0")[1]
    assert "was deleted by" in run("gc", "--delete")[1]
    assert (tmp_path / "job" / "job.json").exists()
    assert "is restored" in run("undelete")[1]
    assert run("jobs")[1] == "job\n"
    assert run("savepoints", "--create", "kept")[0] == 0
    assert "objects of" in run("delete", "--write", "--now")[1]
    assert run("jobs")[1].startswith("dstl: there are no jobs in ")
    assert run("undelete")[0] == 2
    code, record = run("audit")

    acts = [line.split("  ")[2] for line in record.splitlines()]
    assert (code, acts) == (0, ["open", "delete", "undelete", "create savepoint", "delete"])
    assert "savepoint=kept" in record
    assert '"act": "undelete"' in run("audit", "--json")[1]


def test_command_deletes_a_damaged_job_and_says_what_that_means(run: Any, tmp_path: Path) -> None:
    """A job with an unreadable registry is deleted with `--now`, with a warning that no query is stopped."""
    (tmp_path / "job" / "job.json").write_bytes(b"damaged")

    code, written = run("delete", "--write", "--now")
    assert (code, "is not stopped by this" in written) == (0, True)
    assert run("jobs")[1].startswith("dstl: there are no jobs in ")


def test_running_query_is_fenced_by_a_deletion(tmp_path: Path) -> None:
    """I4: a query that still runs fails at its next checkpoint, before its objects are deleted."""
    with service(LocalStore(tmp_path)) as life:
        life.open()
        base = life.complete(0, None, life.append())
        assert cli.main(["delete", "job", "--write", "--storage", tmp_path.as_uri()]) == 0
        refused = life.complete_raw(1, base, life.append(checkpoint_id=1))

        assert (refused.status_code, refused.json()["kind"]) == (409, "fenced")


@pytest.mark.parametrize("is_deleted", [False, True])
def test_who_clears_a_name_and_dies_deletes_no_job_that_was_created_meanwhile(*, is_deleted: bool) -> None:
    """I11: a job created while leftovers are examined is not collected, and stays deleted if it was deleted."""
    store, clock = MemoryStore(), FakeClock()
    store.put("job/segments/h/1.seg", b"left")
    paused, other = PausingStore(store), Deletions(store, clock, FakeIds(2))

    def create() -> None:
        store.put("job/job.json", encode_job("f" * 32, 128))  # by an earlier version, which did not look for leftovers
        if is_deleted:
            other.bury("job", "ann", 60)

    paused.pause_at("put", "@deleted/*", create)
    if not is_deleted:
        paused.pause_at("put", "job/job.json", kill)
    with pytest.raises(ConflictError if is_deleted else Killed):
        Deletions(paused, clock, FakeIds(1)).clear("job", "bob", 128)

    assert other.collect_expired() == []
    assert JobStore(store, "job", clock, FakeIds(4)).exists()
    found = other.of("job")
    assert found is not None
    assert found.who == ("ann" if is_deleted else "bob")
