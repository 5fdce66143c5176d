"""
A job's cluster for the model check: one store, processes with clocks of their own, and the invariants.

`History.prepare` runs once; each schedule starts with a copy of the prepared cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend_client.sinks.protocol import Marker
from dstl_service.wire import CheckpointRef
from storage.clock import Clock
from storage.testing import FakeClock
from tests.modelcheck.explorer import Run
from tests.modelcheck.oracle import Oracle
from tests.modelcheck.scheduler import Scheduler, TurnsStore, ViolationError

JOB = "job"
RETAINED = 2
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS


class ProcessClock(Clock):
    """
    A process's clock.

    Args:
        cluster: The true time.
        wrong_ms: How far its wall time is ahead of that.
    """

    def __init__(self, cluster: FakeClock, wrong_ms: int = 0) -> None:
        self._cluster = cluster
        self._wrong_ms = wrong_ms
        self.waited_ms = 0

    def now_ms(self) -> int:
        """Return the process's wall time."""
        return self._cluster.now_ms() + self._wrong_ms

    def monotonic_ms(self) -> int:
        """Return the time since the cluster began, plus the time this process has waited for its own timers."""
        return self._cluster.monotonic_ms() + self.waited_ms


@dataclass
class Outside:
    """The system to which output is published: the records that a reader sees, and the marker beside them."""

    records: list[str] = field(default_factory=list)
    marker: Marker | None = None


class CheckedCluster:
    """The store, the clock and the actors of one run of a history."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.scheduler = Scheduler()
        self.store = TurnsStore(self.scheduler, self.clock)
        self.oracle = Oracle(self.store, RETAINED)
        self.oracles = {JOB: self.oracle}
        self.processes = 0
        self.mail: list[object] = []
        self.outside = Outside()
        self._listen()

    def actor(self, name: str, run: Callable[[], object], process: str = "") -> None:
        """Add an actor; those of one process share its memory."""
        self.scheduler.add(name, run, process)

    def post(self, message: object) -> None:
        """Send a message to other actors."""
        self.scheduler.observe("post", len(self.mail))
        self.mail.append(message)

    def await_mail(self, count: int = 1) -> None:
        """Wait until this number of messages was posted."""
        self.scheduler.wait_until(lambda: len(self.mail) >= count, "waits for a message")
        self.scheduler.observe("mail", len(self.mail))

    def pass_time(self, *steps_ms: int) -> None:
        """Let time pass; an actor of its own, so that time may pass at any moment."""
        for step_ms in steps_ms:
            self.scheduler.yield_before(f"{step_ms // MINUTE_MS} minutes pass")
            self.clock.advance(step_ms)

    def oracle_of(self, job: str) -> Oracle:
        """Return what observes a job."""
        if job not in self.oracles:
            self.watch(job, Oracle(self.store, RETAINED, job))
        return self.oracles[job]

    def completed(self, uid: str, job: str = JOB) -> None:
        """Record that a checkpoint was reported to its driver."""
        self.oracle_of(job).reported.append(uid)

    def saved(self, name: str, ref: CheckpointRef, job: str = JOB) -> None:
        """Record that a savepoint of a checkpoint was reported to its caller."""
        self.oracle_of(job).save(name, ref)
        self._judge(lambda: self.oracle_of(job).check("after the report of savepoint " + name))

    def unsaved(self, name: str, job: str = JOB) -> None:
        """Record that a savepoint is about to be deleted, which may happen at any time from now on."""
        self.oracle_of(job).savepoints.pop(name, None)
        self.oracle_of(job).deleted.append(name)

    def copy(self) -> CheckedCluster:
        """Return a cluster in the same state, without the processes of this one."""
        other = CheckedCluster()
        other.clock.advance(self.clock.monotonic_ms())
        other.store.load(self.store.objects())
        other.oracle = self.oracle.copy(other.store)
        other.oracles = {JOB: other.oracle}
        for job, oracle in self.oracles.items():
            if job != JOB:
                other.watch(job, oracle.copy(other.store))
        other.processes = self.processes
        other.outside = Outside([*self.outside.records], self.outside.marker)
        return other

    def state(self) -> int:
        """Return a number that is equal for equal states of store and time."""
        return hash((self.store.fingerprint, self.clock.monotonic_ms(), self.outside.marker))

    def state_at_the_end(self) -> int:
        """Return a number that is equal for clusters at rest that no check can tell apart."""
        oracles = tuple(oracle.state() for oracle in self.oracles.values())
        return hash((self.state(), oracles, self.processes))

    def watch(self, job: str, oracle: Oracle) -> None:
        """Have an oracle observe another job."""
        oracle.share(self.oracle.knowledge)
        self.oracles[job] = oracle

    def _listen(self) -> None:
        self.store.on_put = lambda key, data: self._judge(lambda: self._put(key, data))
        self.store.on_delete = lambda key: self._judge(lambda: self._delete(key))

    def _put(self, key: str, data: bytes) -> None:
        self.oracle_of(_job_of(key)).put(key, data)
        self._check_output()

    def _delete(self, key: str) -> None:
        job = _job_of(key)
        self.oracle_of(job).delete(key)
        for other, oracle in self.oracles.items():
            if other != job:
                oracle.check("after the deletion of " + key)
        self._check_output()

    def check_output(self) -> None:
        """Check what was published, and that what was not can be read."""
        self._judge(self._check_output)

    def _check_output(self) -> None:
        self.oracle.check_output(self.outside.records, self.outside.marker)

    def _judge(self, check: Callable[[], object]) -> None:
        try:
            check()
        except ViolationError as violation:
            if self.scheduler.current is None:
                raise
            self.scheduler.fail(violation)


@dataclass(frozen=True, slots=True)
class History:
    """
    The actions of a history.

    Args:
        prepare: Creates the state before the history, without turns.
        begin: Adds the actors to a copy of that cluster.
        finish: Checks a cluster in which no actor can continue.
    """

    prepare: Callable[[CheckedCluster], None]
    begin: Callable[[CheckedCluster], None]
    finish: Callable[[CheckedCluster], None]

    def maker(self) -> Callable[[], Run]:
        """Return a function that starts the history again."""
        before = CheckedCluster()
        self.prepare(before)
        sound: set[int] = set()

        def finish(cluster: CheckedCluster) -> None:
            """Check the end of a schedule, unless another one has come to the same end."""
            state = cluster.state_at_the_end()
            if state not in sound:
                self.finish(cluster)
                sound.add(state)

        def make() -> Run:
            cluster = before.copy()
            self.begin(cluster)
            return Run(cluster.scheduler, cluster.state, lambda: finish(cluster))

        return make


def _job_of(key: str) -> str:
    """Return the job to which an object belongs, whether it lies in its folder or beside it."""
    folder, _, rest = key.partition("/")
    return rest.partition("/")[0] if folder in ("@lives", "@fates") else JOB if folder.startswith("@") else folder
