"""
Any interleaving of drivers that take a job over, complete checkpoints, repeat requests and crash.

Steps: several drivers share one store, each with its own process. Just before any put of one driver, steps of others
may run to their end, as they could on other hosts.

A failure means that two drivers could both believe they own the job: a checkpoint that one of them reported as complete
is replaced, or a state is restored that no run without failures could have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dstl_service.formats.manifest import Manifest, ManifestKind, decode_manifest
from dstl_service.registry.job_store import JobStore
from storage.errors import ConflictError, FencedError, UnavailableError
from storage.memory_store import MemoryStore
from storage.object_store import ObjectData
from storage.testing import FakeClock, FakeIds

DRIVERS = 3
_LOSE = "lose the response"

Step = tuple[str, int]
STEPS = st.tuples(
    st.sampled_from(["claim", "create", "take_over", "retry", "repeat", "crash", _LOSE]), st.integers(0, DRIVERS - 1)
)


class InterleavingStore(MemoryStore):
    """Runs other drivers' steps before every put, and loses the response of the next put on request."""

    def __init__(self, before_put: Callable[[], bool]) -> None:
        super().__init__()
        self._before_put = before_put

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Run other steps first, then put."""
        lost = self._before_put()
        super().put(key, data, if_absent=if_absent)
        if lost:
            raise UnavailableError("the response was lost")


@dataclass
class FencedDriver:
    """The state of one driver: its epoch, its base, and the request that was not answered."""

    jobs: JobStore
    epoch: int = 0
    latest: Manifest | None = None
    open_request: Manifest | None = None
    busy: bool = False
    reported: list[Manifest] = field(default_factory=list)


class Fencing(RuleBasedStateMachine):
    """Drivers of one job."""

    def __init__(self) -> None:
        super().__init__()
        self.store = InterleavingStore(self.meanwhile)
        self.ids = FakeIds(0)
        self.hosts = 0  # counts processes; each has its own ids
        self.planned: list[list[Step]] = []
        self.claimed: list[tuple[int, set[tuple[int, str]]]] = []
        self.drivers: list[FencedDriver] = []
        self.decoded: dict[str, Manifest] = {}

    @initialize()
    def start(self) -> None:
        """Start with drivers that own nothing."""
        self.drivers = [FencedDriver(self.process()) for _ in range(DRIVERS)]

    @rule(step=STEPS, meanwhile=st.lists(st.lists(STEPS, max_size=2), max_size=3))
    def act(self, step: Step, meanwhile: list[list[Step]]) -> None:
        """Run one step of a driver, and others before its first, second and third put."""
        self.planned = meanwhile
        self.run(step)
        self.planned = []

    @invariant()
    def newest_is_end_of_chain(self) -> None:
        """I3: the newest generations of all ids are a chain without a gap."""
        newest = list({manifest.id: manifest for manifest in self.checkpoints()}.values())
        assert [manifest.id for manifest in newest] == list(range(len(newest)))
        assert [manifest.base for manifest in newest] == [None, *(manifest.ref for manifest in newest)][: len(newest)]

    def teardown(self) -> None:
        """Read the history again, as a new process."""
        if self.drivers:
            completed = list(self.process().completed())
            assert not completed or list(self.process().chain(completed[-1].ref)) == completed[::-1]

    @invariant()
    def reported_checkpoints_stay(self) -> None:
        """I3: every checkpoint that was reported to a driver exists for good and is never replaced."""
        completed = self.checkpoints()
        for driver in self.drivers:
            assert {manifest.ref for manifest in driver.reported} <= {manifest.ref for manifest in completed}

    @invariant()
    def uid_names_one_manifest(self) -> None:
        """I8: however often a request was repeated, there is one manifest for its id and uid."""
        counts = Counter((manifest.id, manifest.uid) for manifest in self.checkpoints())
        assert not [name for name, count in counts.items() if count > 1]

    @invariant()
    def older_epochs_add_nothing(self) -> None:
        """I4: after a claim has returned, no new checkpoint of an older epoch appears."""
        for epoch, before in self.claimed:
            older = {(manifest.id, manifest.uid) for manifest in self.checkpoints() if manifest.epoch < epoch}
            assert older <= before

    def checkpoints(self) -> list[Manifest]:
        """Return all manifests that are not fences, in the order of their places."""
        keys = [info.key for info in self.store.list("job/checkpoints/")]
        for key in keys:
            if key not in self.decoded:
                self.decoded[key] = decode_manifest(self.store.get(key), key)
        return [self.decoded[key] for key in keys if self.decoded[key].kind is not ManifestKind.FENCE]

    def process(self) -> JobStore:
        """Return the state of a new process."""
        self.hosts += 1
        jobs = JobStore(self.store, "job", FakeClock(), FakeIds(self.hosts))
        plan, self.planned = self.planned, []
        jobs.open(None)
        self.planned = plan
        return jobs

    def meanwhile(self) -> bool:
        """Run the steps that are planned for this put; return whether its response is lost."""
        if not self.planned:
            return False
        steps, plan = self.planned[0], self.planned[1:]
        self.planned = []
        for step in steps:
            self.run(step)
        self.planned = plan
        return any(name == _LOSE for name, _ in steps)

    def run(self, step: Step) -> None:
        """Let a driver execute its step, unless it is in the middle of one."""
        name, number = step
        driver = self.drivers[number] if self.drivers else None
        if driver is None or driver.busy or name == _LOSE:
            return
        driver.busy = True
        try:
            getattr(self, f"_{name}")(driver)
        except (FencedError, ConflictError):
            driver.epoch = 0
        except UnavailableError:
            pass
        finally:
            driver.busy = False

    def _claim(self, driver: FencedDriver) -> None:
        driver.epoch, driver.open_request = 0, None
        epoch, latest = driver.jobs.claim("driver")
        driver.epoch, driver.latest = epoch, latest
        self.claimed.append((epoch, {(manifest.id, manifest.uid) for manifest in self.checkpoints()}))

    def _take_over(self, driver: FencedDriver) -> None:
        self._claim(driver)
        self._create(driver)

    def _create(self, driver: FencedDriver) -> None:
        if driver.epoch and driver.open_request is None:
            self._request(driver, driver.latest)

    def _repeat(self, driver: FencedDriver) -> None:
        """Execute the batch again whose request was not answered: the same base, another uid."""
        if driver.epoch and driver.open_request is not None:
            self._request(driver, driver.latest)

    def _retry(self, driver: FencedDriver) -> None:
        """Send the request again that was not answered."""
        if driver.epoch and driver.open_request is not None:
            self._send(driver, driver.open_request)

    def _crash(self, driver: FencedDriver) -> None:
        """Restart the service of a driver; the driver continues."""
        driver.jobs = self.process()

    def _request(self, driver: FencedDriver, base: Manifest | None) -> None:
        request = Manifest(
            kind=ManifestKind.DELTA,
            job_uid=driver.jobs.job_uid,
            id=base.id + 1 if base else 0,
            generation=0,
            uid=self.ids.unique_id(),
            epoch=driver.epoch,
            created_ms=0,
            base=base.ref if base else None,
        )
        self._send(driver, request)

    def _send(self, driver: FencedDriver, request: Manifest) -> None:
        driver.open_request = request
        made, _ = driver.jobs.create_manifest(request)
        driver.latest, driver.open_request = made, None
        driver.reported.append(made)


TestFencing = Fencing.TestCase
TestFencing.__doc__ = "I4: whatever drivers do and whenever they do it, the job has one history."
