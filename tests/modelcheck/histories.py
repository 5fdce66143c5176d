"""
The explored histories: their actors, and what each actor does.

Each history is small, so that all its schedules with few preemptions can be run. An actor may be paused for any time
before any call to the store and, where kills are allowed, may never continue.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from dstl_service.wire import CheckpointRef
from storage.errors import DstlError
from tests.modelcheck.cluster import DAY_MS, HOUR_MS, MINUTE_MS, CheckedCluster, History
from tests.modelcheck.code_under_check import Process, finish, first_checkpoints
from tests.modelcheck.scheduler import ViolationError

HISTORIES: dict[str, History] = {}
Step: TypeAlias = Callable[[CheckedCluster], None]


def history(prepare: Step) -> Callable[[Step], Step]:
    """Take the decorated function, which adds the actors, for a history of its name, begun where `prepare` ended."""

    def register(begin: Step) -> Step:
        HISTORIES[begin.__name__] = History(prepare, begin, finish)
        return begin

    return register


def three_checkpoints(cluster: CheckedCluster) -> None:
    """Start with three checkpoints."""
    first_checkpoints(cluster, 3)


def taken_over(cluster: CheckedCluster, **how: Any) -> Process:
    """Return the process of a driver that owns the job."""
    driver = Process(cluster, **how)
    driver.open()
    return driver


# --- Drivers ---------------------------------------------------------------------------------------------------------


@history(three_checkpoints)
def two_drivers(cluster: CheckedCluster) -> None:
    """An owner continues while another driver takes over."""
    first, second = taken_over(cluster), Process(cluster)

    def take_over() -> None:
        second.open()
        second.batch()
        second.settle()

    cluster.actor("first", lambda: (first.batch(), first.settle(), first.batch()))
    cluster.actor("second", take_over)


@history(three_checkpoints)
def three_drivers(cluster: CheckedCluster) -> None:
    """Two drivers take over from a third at once."""
    first = taken_over(cluster)
    cluster.actor("first", first.batch)
    for name in ("second", "third"):
        process = Process(cluster)

        def take_over(process: Process = process) -> None:
            process.open()
            process.batch()

        cluster.actor(name, take_over)


# --- Snapshots -------------------------------------------------------------------------------------------------------


def _announced(driver: Process, sidecar: Process) -> CheckpointRef:
    """Complete a checkpoint that lists a snapshot of the one before, which the sidecar may then store."""
    assert driver.base is not None
    told = sidecar.announce(driver.base)
    return driver.batch(*([told] if told else []))


def _upload(cluster: CheckedCluster, sidecar: Process, version: CheckpointRef) -> None:
    """Store a snapshot, and inform its task's driver."""
    try:
        stored = sidecar.upload(version)
    except DstlError:
        stored = None
    cluster.post(stored)


def _reported(cluster: CheckedCluster) -> list[dict[str, Any]]:
    """Return what tasks have reported of their snapshots so far."""
    return [message for message in cluster.mail if isinstance(message, dict)]


def orphaned_snapshot(cluster: CheckedCluster) -> None:
    """Start with a snapshot that no checkpoint lists, and with checkpoints so much newer that none will."""
    driver, sidecar = first_checkpoints(cluster, 2), Process(cluster)
    sidecar.upload(_announced(driver, sidecar))
    for _ in range(4):
        driver.batch()
        driver.settle()
    cluster.clock.advance(8 * DAY_MS)


@history(orphaned_snapshot)
def snapshot_with_files_of_an_orphan(cluster: CheckedCluster) -> None:
    """A collector finds an old orphan while the table's next snapshot, with equal files, is stored and listed."""
    driver, sidecar, collector = taken_over(cluster), Process(cluster), Process(cluster)

    def work() -> None:
        _upload(cluster, sidecar, _announced(driver, sidecar))
        driver.batch(*_reported(cluster))

    cluster.actor("collector", collector.collect)
    cluster.actor("table", work)


@history(orphaned_snapshot)
def snapshot_of_an_earlier_process(cluster: CheckedCluster) -> None:
    """Sidecars find a snapshot that an earlier one stored, and offer it to two drivers, while garbage is collected."""
    driver, second, collector = taken_over(cluster), Process(cluster), Process(cluster)

    def take_up(owner: Process, sidecar: Process) -> None:
        for _ in range(2):
            assert owner.base is not None
            told = sidecar.offered(owner.base)
            owner.batch(*([told] if told else []))

    sidecars = [Process(cluster), Process(cluster)]
    cluster.actor("driver", lambda: take_up(driver, sidecars[0]))
    cluster.actor("collector", collector.collect)
    cluster.actor("second", lambda: (second.open(), take_up(second, sidecars[1])))


def _upload_while_the_job_goes_on(cluster: CheckedCluster, passes_ms: int, wrong_ms: int) -> None:
    driver, sidecar, collector = taken_over(cluster), Process(cluster), Process(cluster, wrong_ms)
    version = _announced(driver, sidecar)

    def elsewhere() -> None:
        for _ in range(3):
            driver.batch()
        cluster.pass_time(passes_ms)
        collector.collect()
        cluster.await_mail()
        driver.batch(*_reported(cluster))

    cluster.actor("sidecar", lambda: _upload(cluster, sidecar, version))
    cluster.actor("elsewhere", elsewhere)


@history(three_checkpoints)
def snapshot_of_a_suspended_host(cluster: CheckedCluster) -> None:
    """A host is suspended in the middle of an upload while the job continues elsewhere; then it resumes and reports."""
    _upload_while_the_job_goes_on(cluster, HOUR_MS, 0)


@history(three_checkpoints)
def snapshot_and_a_clock_that_is_ahead(cluster: CheckedCluster) -> None:
    """The job continues elsewhere during an upload, and the clock of its collector is an hour ahead."""
    _upload_while_the_job_goes_on(cluster, MINUTE_MS, HOUR_MS)


@history(three_checkpoints)
def snapshot_that_is_let_go(cluster: CheckedCluster) -> None:
    """A host is suspended in an upload; another one starts a snapshot of the table instead; the first one resumes."""
    driver, sidecar, other, collector = (
        taken_over(cluster),
        Process(cluster),
        Process(cluster),
        Process(cluster, HOUR_MS),
    )
    version = _announced(driver, sidecar)

    def elsewhere() -> None:
        _announced(driver, other)
        collector.collect()
        cluster.await_mail()
        driver.batch(*_reported(cluster))

    cluster.actor("sidecar", lambda: _upload(cluster, sidecar, version))
    cluster.actor("elsewhere", elsewhere)


def _upload_and_collect(cluster: CheckedCluster, wrong_ms: int) -> None:
    driver, sidecar, collector = taken_over(cluster), Process(cluster), Process(cluster, wrong_ms)

    def work() -> None:
        _upload(cluster, sidecar, _announced(driver, sidecar))
        driver.batch(*_reported(cluster))
        driver.batch()
        driver.settle()

    cluster.actor("table", work)
    cluster.actor("collector", collector.collect)


@history(three_checkpoints)
def collector_one_hour_ahead(cluster: CheckedCluster) -> None:
    """A collector whose clock is an hour ahead finds a snapshot during its upload."""
    _upload_and_collect(cluster, HOUR_MS)


@history(three_checkpoints)
def collector_one_hour_behind(cluster: CheckedCluster) -> None:
    """A collector whose clock is an hour behind finds a snapshot during its upload."""
    _upload_and_collect(cluster, -HOUR_MS)


@history(three_checkpoints)
def long_batch_and_fast_collector(cluster: CheckedCluster) -> None:
    """A batch takes an hour while a collector whose clock is an hour ahead runs, and another driver takes over."""
    driver, second, collector = taken_over(cluster), Process(cluster), Process(cluster, HOUR_MS)
    cluster.actor("driver", lambda: (driver.batch(), driver.batch()))
    cluster.actor("time", lambda: cluster.pass_time(HOUR_MS))
    cluster.actor("collector", collector.collect)
    cluster.actor("second", lambda: (second.open(), second.batch()))


# --- Rewinds ---------------------------------------------------------------------------------------------------------


@history(three_checkpoints)
def rewind_to_what_is_being_deleted(cluster: CheckedCluster) -> None:
    """The job is rewound to a checkpoint that a former coordinator is about to delete."""
    driver, operator = taken_over(cluster, compacts=True), Process(cluster)
    for _ in range(5):  # compacted repeatedly, so that subsumed checkpoints have objects of their own
        driver.batch()
        driver.settle()
    cluster.clock.advance(2 * MINUTE_MS)
    cluster.actor("operator", lambda: operator.rewind(checkpoint_id=1, checkpoints_max=10))
    cluster.actor("coordinator", driver.settle)


def kept_and_gone_on(cluster: CheckedCluster) -> None:
    """Start with a savepoint whose checkpoint is subsumed."""
    driver = first_checkpoints(cluster, 2, compacts=True)
    driver.save("kept")
    for _ in range(7):
        driver.batch()
        driver.settle()
        cluster.clock.advance(2 * MINUTE_MS)
    driver.settle()
    cluster.clock.advance(8 * DAY_MS)


@history(kept_and_gone_on)
def rewind_to_a_savepoint_that_is_deleted(cluster: CheckedCluster) -> None:
    """The job is rewound to a savepoint, which is then deleted, while a collector runs."""
    operator, collector = Process(cluster), Process(cluster)
    cluster.actor("collector", collector.collect)
    cluster.actor("operator", lambda: (operator.rewind(savepoint="kept"), operator.forget_savepoint("kept")))


@history(three_checkpoints)
def rewind_and_a_driver_that_starts(cluster: CheckedCluster) -> None:
    """A driver starts while the job is rewound."""
    operator, driver = Process(cluster), Process(cluster)
    cluster.actor("operator", lambda: operator.rewind(checkpoint_id=1))
    cluster.actor("driver", lambda: (driver.open(), driver.batch(), driver.batch()))


@history(three_checkpoints)
def rewind_and_the_owner(cluster: CheckedCluster) -> None:
    """The job is rewound while its query runs, or while its last request is pending."""
    driver, operator = taken_over(cluster), Process(cluster)

    def work() -> None:
        for _ in range(3):
            driver.batch()
            driver.settle()
            cluster.pass_time(2 * MINUTE_MS)

    cluster.actor("operator", lambda: operator.rewind(checkpoint_id=1))
    cluster.actor("driver", work)


def saved_once(cluster: CheckedCluster) -> None:
    """Start with three checkpoints, the first of which is a savepoint."""
    driver = first_checkpoints(cluster, 1)
    driver.save("kept")
    driver.batch()
    driver.batch()


@history(saved_once)
def two_rewinds(cluster: CheckedCluster) -> None:
    """Two people rewind the job at once, to different checkpoints."""
    one, other = Process(cluster), Process(cluster)
    cluster.actor("one", lambda: one.rewind(checkpoint_id=1))
    cluster.actor("other", lambda: other.rewind(savepoint="kept"))


@history(saved_once)
def rewind_and_two_drivers(cluster: CheckedCluster) -> None:
    """Two drivers start while the job is rewound, and a collector runs."""
    operator, first, second, collector = Process(cluster), Process(cluster), Process(cluster), Process(cluster, HOUR_MS)
    cluster.actor("operator", lambda: operator.rewind(savepoint="kept"))
    cluster.actor("first", lambda: (first.open(), first.batch()))
    cluster.actor("second", lambda: (second.open(), second.batch()))
    cluster.actor("collector", collector.collect)


@history(three_checkpoints)
def snapshot_over_a_rewind(cluster: CheckedCluster) -> None:
    """A snapshot that was begun before a rewind is reported after it."""
    sidecar, operator, collector = Process(cluster), Process(cluster), Process(cluster)
    driver = Process(cluster)
    listed = _announced(taken_over(cluster), sidecar)

    def go_on() -> None:
        operator.rewind(checkpoint_id=2)
        driver.open()
        driver.batch()
        cluster.await_mail()
        driver.batch(*_reported(cluster))

    cluster.actor("sidecar", lambda: _upload(cluster, sidecar, listed))
    cluster.actor("others", go_on)
    cluster.actor("collector", lambda: (cluster.pass_time(HOUR_MS), collector.collect()))


@history(three_checkpoints)
def snapshot_that_is_let_go_before_a_rewind(cluster: CheckedCluster) -> None:
    """A dropped snapshot, which a collector has deleted, is reported after a rewind to an earlier checkpoint."""
    owner, sidecar, other, operator = taken_over(cluster), Process(cluster), Process(cluster), Process(cluster)
    driver, collector = Process(cluster), Process(cluster, HOUR_MS)
    listed = _announced(owner, sidecar)

    def go_on() -> None:
        _announced(owner, other)
        collector.collect()
        operator.rewind(checkpoint_id=listed.id)
        driver.open()
        driver.batch()
        cluster.await_mail()
        driver.batch(*_reported(cluster))

    cluster.actor("sidecar", lambda: _upload(cluster, sidecar, listed))
    cluster.actor("others", go_on)


# --- Deletions -------------------------------------------------------------------------------------------------------


def kept_and_old(cluster: CheckedCluster) -> None:
    """Start with checkpoints, a savepoint and garbage, all so old that no minimum age protects them."""
    driver = first_checkpoints(cluster, 4, compacts=True)
    driver.save("kept")
    cluster.clock.advance(8 * DAY_MS)


@history(kept_and_old)
def deleted_and_created_anew(cluster: CheckedCluster) -> None:
    """A job is created again while two deletions of the former one, its driver and a collector of it may be paused."""
    driver, collector, operator, other = taken_over(cluster), Process(cluster), Process(cluster), Process(cluster)
    collector.look()
    tombstone = operator.bury()

    def delete(process: Process) -> None:
        process.delete(tombstone)
        cluster.post("deleted")

    def begin_again() -> None:
        cluster.await_mail()
        anew = Process(cluster)
        anew.open()
        for _ in range(3):
            anew.batch()
        anew.save("kept")
        cluster.pass_time(8 * DAY_MS)
        anew.batch()

    cluster.actor("one", lambda: delete(operator))
    cluster.actor("other", lambda: delete(other))
    cluster.actor("collector", collector.collect)
    cluster.actor("driver", driver.batch)
    cluster.actor("anew", begin_again)


@history(kept_and_old)
def undeleted_while_it_is_collected(cluster: CheckedCluster) -> None:
    """A deleted job is brought back, and deleted again, while it is collected; a query of it runs, another starts."""
    driver, query = taken_over(cluster), Process(cluster)
    person, again, collector = Process(cluster), Process(cluster), Process(cluster, HOUR_MS)
    person.bury()
    cluster.actor("person", person.undelete)
    cluster.actor("collector", collector.delete_buried)
    cluster.actor("driver", driver.batch)
    cluster.actor("query", lambda: (query.open(), query.batch()))
    cluster.actor("again", again.bury)


# --- Savepoints ------------------------------------------------------------------------------------------------------


@history(three_checkpoints)
def savepoint_of_what_is_being_subsumed(cluster: CheckedCluster) -> None:
    """A savepoint is made of a checkpoint that is being subsumed, deleted, and collected."""
    driver, person = taken_over(cluster, compacts=True), Process(cluster)
    for _ in range(5):
        driver.batch()
        driver.settle()
    cluster.clock.advance(2 * MINUTE_MS)
    cluster.actor("person", lambda: person.save("kept", 2))
    cluster.actor("coordinator", driver.settle)


@history(kept_and_gone_on)
def savepoint_is_deleted(cluster: CheckedCluster) -> None:
    """A savepoint is deleted while a collector runs, and another one is made of the newest checkpoint."""
    driver, person, collector = taken_over(cluster), Process(cluster), Process(cluster)
    cluster.actor("person", lambda: (person.forget_savepoint("kept"), person.save("other")))
    cluster.actor("collector", collector.collect)
    cluster.actor("driver", lambda: (driver.batch(), driver.settle()))


def kept_once(cluster: CheckedCluster) -> None:
    """Start with two checkpoints, the first of which is a savepoint."""
    driver = first_checkpoints(cluster, 1)
    driver.save("kept")
    driver.batch()


@history(kept_once)
def savepoint_is_deleted_again(cluster: CheckedCluster) -> None:
    """A deletion is repeated while the first one is paused, and a savepoint of that name is made again."""
    one, other, collector = Process(cluster), Process(cluster), Process(cluster)

    def repeat() -> None:
        with suppress(DstlError):
            other.forget_savepoint("kept")
        other.save("kept")

    cluster.actor("one", lambda: one.forget_savepoint("kept"))
    cluster.actor("other", repeat)
    cluster.actor("collector", collector.collect)


@history(three_checkpoints)
def two_savepoints_of_one_name(cluster: CheckedCluster) -> None:
    """Three processes make a savepoint of one name, two of them of the same checkpoint, while a collector runs."""
    collector = Process(cluster)
    for name, checkpoint_id in ("one", 1), ("other", 2), ("third", 2):
        process = Process(cluster)
        cluster.actor(name, partial(process.save, "kept", checkpoint_id))
    cluster.actor("collector", collector.collect)


@history(kept_once)
def pins_are_deleted(cluster: CheckedCluster) -> None:
    """All listed savepoints are deleted while two processes make one of the same name, and one of them may die."""
    one, other, person = Process(cluster), Process(cluster), Process(cluster)

    def clear() -> None:
        for name in person.jobs().savepoints.names():
            with suppress(DstlError):
                cluster.unsaved(name.partition("@")[0])
                person.jobs().savepoints.delete(name)

    cluster.actor("one", lambda: one.save("kept", 0))
    cluster.actor("other", lambda: other.save("new", 1))
    cluster.actor("person", clear)


# --- Forks -----------------------------------------------------------------------------------------------------------


GONE_ON = 5
"""After this number of batches that compact, a job's checkpoints name nothing of before."""


def goes_on(cluster: CheckedCluster, job: str, batches: int = 1) -> None:
    """Have another driver take a job over, replace its log in each batch, and delete what is subsumed."""
    driver = taken_over(cluster, compacts=True, job=job)
    for _ in range(batches):
        driver.batch()
        driver.settle()
        cluster.pass_time(2 * MINUTE_MS)
    driver.settle()


@history(kept_and_gone_on)
def fork_of_a_savepoint_that_is_deleted(cluster: CheckedCluster) -> None:
    """A savepoint is forked and then deleted, while the parent is rewound and collected, and the fork begins."""
    person, collector, operator = Process(cluster), Process(cluster, HOUR_MS), Process(cluster)
    cluster.actor("person", lambda: (person.fork("fork", savepoint="kept"), person.forget_savepoint("kept")))
    cluster.actor("collector", lambda: (collector.collect(), collector.collect()))
    cluster.actor("query", lambda: goes_on(cluster, "fork") if cluster.oracle_of("fork").newest else None)
    cluster.actor("operator", lambda: operator.rewind(savepoint="kept"))


@history(three_checkpoints)
def fork_of_what_is_being_subsumed(cluster: CheckedCluster) -> None:
    """Two people fork one checkpoint under one name, while it is being subsumed."""
    driver, one, other = taken_over(cluster, compacts=True), Process(cluster), Process(cluster)
    for _ in range(5):
        driver.batch()
        driver.settle()
    cluster.clock.advance(2 * MINUTE_MS)
    cluster.actor("one", lambda: one.fork("fork", checkpoint_id=2, checkpoints_max=10))
    cluster.actor("other", lambda: other.fork("fork", checkpoint_id=2, checkpoints_max=10))
    cluster.actor("coordinator", driver.settle)


def _gone_on(cluster: CheckedCluster) -> None:
    """Have the parent replace what it had in common with its fork, which only the hold keeps from now on."""
    goes_on(cluster, "job", GONE_ON)
    cluster.clock.advance(8 * DAY_MS)
    Process(cluster).collect()


def forked(cluster: CheckedCluster) -> None:
    """Start with a fork whose parent has replaced what it had in common with it."""
    first_checkpoints(cluster, 3)
    Process(cluster).fork("fork")
    _gone_on(cluster)


def forked_with_a_snapshot(cluster: CheckedCluster) -> None:
    """Start with a fork whose state has a snapshot of its parent's, and two change sets."""
    driver, sidecar = first_checkpoints(cluster, 2), Process(cluster)
    driver.batch(*[told for told in [sidecar.upload(_announced(driver, sidecar))] if told])
    driver.batch()
    Process(cluster).fork("fork")
    cluster.clock.advance(8 * DAY_MS)


def forked_and_gone_on(cluster: CheckedCluster) -> None:
    """Start with a parent that still has what it had in common with its fork, which has almost replaced it."""
    first_checkpoints(cluster, 3).save("kept")
    Process(cluster).fork("fork")
    goes_on(cluster, "fork", GONE_ON - 1)
    cluster.clock.advance(8 * DAY_MS)


@history(forked_and_gone_on)
def fork_and_its_parent_go_on(cluster: CheckedCluster) -> None:
    """Parent and fork replace what they began with; collectors of both run; the fork makes a savepoint."""
    mine, theirs, person = Process(cluster, job="fork"), Process(cluster, HOUR_MS), Process(cluster, job="fork")
    cluster.actor("fork", lambda: goes_on(cluster, "fork", 2))
    cluster.actor("parent", lambda: goes_on(cluster, "job"))
    cluster.actor("person", lambda: person.save("kept"))
    cluster.actor("collector", lambda: (mine.collect(), theirs.collect()))


@history(forked_with_a_snapshot)
def fork_that_shares_files_with_its_parent(cluster: CheckedCluster) -> None:
    """A snapshot of the fork shares files with one of its parent, which somebody tries to delete after a collection."""
    driver, sidecar = taken_over(cluster, job="fork"), Process(cluster, job="fork")
    mine, theirs = Process(cluster, job="fork"), Process(cluster, HOUR_MS)

    def work() -> None:
        _upload(cluster, sidecar, _announced(driver, sidecar))
        for _ in range(3):
            driver.batch(*_reported(cluster))
            driver.settle()
            cluster.pass_time(2 * MINUTE_MS)
        driver.settle()

    cluster.actor("fork", work)
    cluster.actor("collector", lambda: (mine.collect(), mine.collect(), theirs.delete(theirs.bury())))


@history(forked)
def fork_that_is_rewound(cluster: CheckedCluster) -> None:
    """A fork that has replaced its state is rewound to a savepoint of where it began, while it releases the hold."""
    person, mine, theirs = Process(cluster, job="fork"), Process(cluster, job="fork"), Process(cluster, HOUR_MS)
    person.save("kept")
    goes_on(cluster, "fork", GONE_ON)
    cluster.clock.advance(8 * DAY_MS)
    cluster.actor("person", lambda: (person.rewind(savepoint="kept"), person.forget_savepoint("kept")))
    cluster.actor("mine", mine.collect)
    cluster.actor("theirs", lambda: (theirs.collect(), theirs.collect()))


@history(forked)
def fork_that_is_saved(cluster: CheckedCluster) -> None:
    """A savepoint is made of where a fork began, which is subsumed, while its collector releases the hold."""
    driver, person = taken_over(cluster, compacts=True, job="fork"), Process(cluster, job="fork")
    mine, theirs = Process(cluster, job="fork"), Process(cluster, HOUR_MS)
    for _ in range(GONE_ON):
        driver.batch()
        driver.settle()
    cluster.clock.advance(8 * DAY_MS)
    cluster.actor("person", lambda: person.save("kept", 2))
    cluster.actor("mine", mine.collect)
    cluster.actor("theirs", theirs.collect)


def fork_begun(cluster: CheckedCluster) -> None:
    """Start with a fork that is decided, whose process died then, all of it old."""
    first_checkpoints(cluster, 3)
    Process(cluster).begin_fork("fork")
    cluster.clock.advance(8 * DAY_MS)


@history(fork_begun)
def fork_and_deletion_of_its_parent(cluster: CheckedCluster) -> None:
    """A job is deleted, and its collector runs, while a query and a person finish a fork of it."""
    person, operator, collector = Process(cluster), Process(cluster), Process(cluster)
    query = Process(cluster, job="fork")
    cluster.actor("operator", lambda: operator.delete(operator.bury()))
    cluster.actor("query", lambda: (query.open(), query.batch()))
    cluster.actor("person", lambda: person.fork("fork"))
    cluster.actor("collector", collector.collect)


@history(forked)
def fork_is_deleted(cluster: CheckedCluster) -> None:
    """A fork is deleted and its name forked again, while the parent is collected and then deleted."""
    operator, person, collector = Process(cluster, job="fork"), Process(cluster), Process(cluster, HOUR_MS)
    query = taken_over(cluster, job="fork")

    def fork_again() -> None:
        with suppress(DstlError):
            operator.delete(operator.bury())
        person.fork("fork")

    cluster.actor("operator", fork_again)
    cluster.actor("query", lambda: (query.batch(), query.settle()))
    cluster.actor("collector", collector.collect)


@history(forked)
def fork_of_a_fork(cluster: CheckedCluster) -> None:
    """A fork that has replaced its state is forked at a savepoint of before, while it releases its hold."""
    first, mine, theirs = Process(cluster, job="fork"), Process(cluster, job="fork"), Process(cluster, HOUR_MS)
    first.save("kept")
    goes_on(cluster, "fork", GONE_ON)
    cluster.clock.advance(8 * DAY_MS)
    cluster.actor("person", lambda: (first.fork("second", savepoint="kept"), first.forget_savepoint("kept")))
    cluster.actor("mine", lambda: (mine.collect(), mine.collect()))
    cluster.actor("theirs", lambda: (theirs.collect(), theirs.collect()))


# --- Compaction ------------------------------------------------------------------------------------------------------


@history(three_checkpoints)
def compaction_and_collection(cluster: CheckedCluster) -> None:
    """A compaction's result waits for its checkpoint while a collector runs and time passes."""
    driver, collector = taken_over(cluster, compacts=True), Process(cluster)
    cluster.actor("driver", lambda: (driver.batch(), driver.settle(), driver.batch(), driver.settle()))
    cluster.actor("collector", lambda: (cluster.pass_time(HOUR_MS), collector.collect()))


@history(three_checkpoints)
def compaction_that_leaves_nothing(cluster: CheckedCluster) -> None:
    """A snapshot is stored while its table is emptied, and the log with all deletions compacted to nothing."""
    driver, sidecar = taken_over(cluster, compacts=True), Process(cluster)
    listed = _announced(driver, sidecar)

    def work() -> None:
        for _ in range(4):
            driver.batch(*_reported(cluster), empties=True)
            driver.settle()
        driver.batch(*_reported(cluster))

    cluster.actor("driver", work)
    cluster.actor("sidecar", lambda: _upload(cluster, sidecar, listed))
    cluster.actor("collector", Process(cluster, HOUR_MS).collect)


# --- Output of a sink ------------------------------------------------------------------------------------------------


def _drains(driver: Process) -> None:
    """Publish as a query does, again after a refusal, unless the driver is out of date."""
    for _ in range(3):
        with suppress(DstlError):
            driver.publish()
            return


def unpublished_output(cluster: CheckedCluster) -> None:
    """Start with four checkpoints, the output of the first of which is published."""
    driver = first_checkpoints(cluster, 1, has_sink=True)
    driver.publish()
    driver.batch()
    driver.batch()
    driver.batch()


@history(unpublished_output)
def output_and_subsumption(cluster: CheckedCluster) -> None:
    """A driver goes on, and subsumed checkpoints are deleted, while its publisher reads the log; it may be killed."""
    driver, collector = taken_over(cluster, has_sink=True), Process(cluster, HOUR_MS)

    def work() -> None:
        for _ in range(4):
            driver.batch()
            driver.settle()
            cluster.pass_time(2 * MINUTE_MS)

    cluster.actor("driver", work, "query")

    def publish() -> None:
        for _ in range(2):
            try:
                driver.publish()
            except DstlError as error:
                raise ViolationError(f"output cannot be published: {error}") from error

    cluster.actor("publisher", publish, "query")
    cluster.actor("collector", collector.collect)


@history(unpublished_output)
def output_of_two_drivers(cluster: CheckedCluster) -> None:
    """A driver stands still and resumes, while another one takes over, publishes and subsumes."""
    first, second = taken_over(cluster, has_sink=True), Process(cluster, compacts=True, has_sink=True)

    def take_over() -> None:
        second.open()
        for _ in range(3):
            second.batch()
            second.publish()
            second.settle()
            cluster.pass_time(2 * MINUTE_MS)

    cluster.actor("first", lambda: (first.batch(), _drains(first), first.batch(), _drains(first)))
    cluster.actor("second", take_over)


@history(unpublished_output)
def output_and_a_rewind(cluster: CheckedCluster) -> None:
    """The job is rewound while its output is published; drivers of before and after publish at once."""
    driver, operator, second = taken_over(cluster, has_sink=True), Process(cluster), Process(cluster, has_sink=True)

    def go_on() -> None:
        operator.rewind(checkpoint_id=2)
        second.open()
        for _ in range(2):
            second.batch()
            second.settle()
        _drains(second)

    cluster.actor("first", lambda: (driver.batch(), _drains(driver), driver.settle()))
    cluster.actor("second", go_on)


@history(unpublished_output)
def output_behind_a_savepoint(cluster: CheckedCluster) -> None:
    """A savepoint with unpublished output is made; the job goes on, is rewound to it, and output is published again."""
    driver, person = taken_over(cluster, has_sink=True), Process(cluster)

    def go_back() -> None:
        person.save("kept")
        driver.publish()
        for _ in range(3):
            driver.batch()
            driver.publish()
            driver.settle()
            cluster.pass_time(2 * MINUTE_MS)
        person.rewind(savepoint="kept")
        driver.open()
        driver.batch()
        _drains(driver)

    collector = Process(cluster, HOUR_MS)
    cluster.actor("person", go_back)
    cluster.actor("collector", collector.collect)


# --- All together ----------------------------------------------------------------------------------------------------


@history(three_checkpoints)
def everything(cluster: CheckedCluster) -> None:
    """Two drivers, snapshots, compactions, two collectors with wrong clocks, a rewind, savepoints; hours pass."""
    first, second = taken_over(cluster, compacts=True), Process(cluster)
    ahead, behind = Process(cluster, HOUR_MS), Process(cluster, -HOUR_MS)
    sidecar, operator, person = Process(cluster), Process(cluster), Process(cluster)

    def work(driver: Process, batches: int) -> None:
        for _ in range(batches):
            driver.batch(*_reported(cluster))
            driver.settle()

    def take_snapshots() -> None:
        for step in range(6):
            newest = cluster.oracle.newest
            assert newest is not None
            cluster.scheduler.observe(newest.uid)
            if step % 2:
                _upload(cluster, sidecar, newest.ref)
                continue
            with suppress(DstlError):
                cluster.post(sidecar.announce(newest.ref))

    def collect(collector: Process) -> None:
        for _ in range(3):
            collector.collect()

    cluster.actor("first", lambda: work(first, 6))
    cluster.actor("sidecar", take_snapshots)
    cluster.actor("time", lambda: cluster.pass_time(*[20 * MINUTE_MS] * 9))
    cluster.actor("ahead", lambda: collect(ahead))
    cluster.actor("behind", lambda: collect(behind))
    cluster.actor("person", lambda: (person.save("kept"), person.save("other"), person.forget_savepoint("kept")))
    cluster.actor("operator", lambda: operator.rewind(checkpoint_id=2))
    cluster.actor("second", lambda: (second.open(), work(second, 5)))
