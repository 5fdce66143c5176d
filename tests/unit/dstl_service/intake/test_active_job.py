"""A service's cache of its jobs, and the eviction from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from prometheus_client.metrics import MetricWrapperBase

from dstl_service.collection.tombstones import Deletions
from dstl_service.composition import compose
from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.peers.client import PeerClient
from dstl_service.registry.job_store import JobStore
from dstl_service.settings import GcSettings, ServiceSettings
from dstl_service.wire import ChangeSetRef, CheckpointRef, CompleteRequest, OpenJob, OperatorInfo
from storage.errors import DstlError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, RecordingStore
from tests.unit.dstl_service.http_life import service
from tests.unit.dstl_service.samples import segment

HOUR_MS = 3_600_000


class Host:
    """A service with a job that has one checkpoint, and a clock that tests move."""

    def __init__(self, gc_interval_s: int) -> None:
        self.clock = FakeClock()
        self.store = RecordingStore(MemoryStore())
        settings = ServiceSettings("memory://x", gc=GcSettings(interval_s=gc_interval_s), shutdown_timeout_s=1)
        self.parts = compose(settings, self.store, self.clock, FakeIds(), PeerClient(lambda: None, 1))

    async def begin(self) -> CheckpointRef:
        """Complete the job's first checkpoint."""
        await self.parts.opener.open("job", OpenJob("test"))
        operators = [OperatorInfo("op", 1, "{}", {})]
        answer = await self.parts.checkpointer.complete("job", 0, CompleteRequest(1, "uid", None, [], operators))
        await sampled(
            self.parts.metrics.background_work.table_bytes
        )  # what follows from the checkpoint has read what it needs
        return answer.ref

    def lost(self) -> ChangeSetRef:
        """Return the references of a set that the service received and no longer has."""
        return ChangeSetRef("op", 0, 1, 0, 0, 0, 1, self.parts.service_id)

    async def reads(self, ref: CheckpointRef) -> int:
        """Return how many manifests a restore reads from the store."""
        self.store.clear()
        await self.parts.restores.plan("job", "op", KeyGroupRange(0, 127), None, ref)
        return self.store.count("get", "job/checkpoints/*")


async def sampled(metric: MetricWrapperBase) -> None:
    """Wait until a metric has a sample of any job."""
    while not next(iter(metric.collect())).samples:  # noqa: ASYNC110 - another task brings it about
        await asyncio.sleep(0.001)


def run(story: Callable[[Host], Awaitable[None]], gc_interval_s: int = 0) -> None:
    """Run a story of a host."""

    async def tell() -> None:
        host = Host(gc_interval_s)
        try:
            await asyncio.wait_for(story(host), 30)
        finally:
            await host.parts.close()

    asyncio.run(tell())


@pytest.mark.parametrize("idle_ms", [HOUR_MS, HOUR_MS + 1])
def test_idle_job_is_let_go_when_another_comes(idle_ms: int) -> None:
    """The cached state of a job that was unused for more than an hour is read again, so that jobs do not pile up."""

    async def story(host: Host) -> None:
        ref = await host.begin()
        assert await host.reads(ref) == 0
        host.clock.advance(idle_ms)
        await host.parts.opener.open("other", OpenJob("test"))

        assert await host.reads(ref) == (1 if idle_ms > HOUR_MS else 0)
        assert await host.reads(ref) == 0

    run(story)


def test_idle_jobs_leave_nothing() -> None:
    """B15: neither memory nor metrics grow with the jobs that a process ever served, and one of them can go on."""

    async def story(host: Host) -> None:
        ref = await host.begin()
        for number in range(20):
            await host.parts.opener.open(f"job-{number}", OpenJob("test"))
        assert b'job="job"' in host.parts.metrics.render()
        host.clock.advance(HOUR_MS + 1)
        await host.parts.opener.open("other", OpenJob("test"))

        assert host.parts.jobs.names == ["other"]
        assert b'job="job' not in host.parts.metrics.render()
        operators = [OperatorInfo("op", 1, "{}", {})]
        answer = await host.parts.checkpointer.complete("job", 1, CompleteRequest(1, "next", ref, [], operators))
        assert answer.ref.id == 1
        assert host.parts.jobs.get("job").owned_epoch == 1

    run(story)


@pytest.mark.parametrize(("weeks", "is_kept"), [(1, True), (2, False)])
def test_sets_of_an_idle_job_wait_for_their_driver(weeks: int, *, is_kept: bool) -> None:
    """A user function may take days before the checkpoint is completed; later its sets count as lost."""

    async def story(host: Host) -> None:
        await host.begin()
        host.parts.jobs.get("job").book.receive(segment(0), 0, preemptive=False)
        host.clock.advance(weeks * 7 * 24 * HOUR_MS)
        host.parts.jobs.evict_idle()

        assert host.parts.jobs.names == (["job"] if is_kept else [])
        assert host.parts.jobs.is_any_reached
        assert (host.parts.jobs.in_flight_bytes > 0) == is_kept

    run(story)


def test_job_with_background_work_stays() -> None:
    """A compaction, and the collection of garbage, end before their job is dropped."""

    async def story(host: Host) -> None:
        await host.begin()
        host.clock.advance(HOUR_MS + 1)
        host.parts.jobs.evict_idle()
        assert host.parts.jobs.names == ["job"]

        while next(iter(host.parts.metrics.background_work.collection_age.collect())).samples:  # noqa: ASYNC110 - until the last is over
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        host.parts.jobs.evict_idle()
        assert host.parts.jobs.names == []

    run(story, gc_interval_s=1)


def test_collection_keeps_no_job_busy() -> None:
    """A coordinator that collects the garbage of an ended job for the last time caches nothing of it."""

    async def story(host: Host) -> None:
        ref = await host.begin()
        host.clock.advance(HOUR_MS + 1)
        while next(iter(host.parts.metrics.background_work.collection_age.collect())).samples:  # noqa: ASYNC110 - until the last is over
            await asyncio.sleep(0.01)

        assert await host.reads(ref) == 1

    run(story, gc_interval_s=1)


def test_name_that_was_only_asked_for_is_not_kept() -> None:
    """Requests for any number of jobs that do not exist leave nothing in memory."""

    async def story(host: Host) -> None:
        for number in range(100):
            with pytest.raises(NotFoundError):
                await host.parts.catalog.checkpoints(f"nobody-{number}")
            with pytest.raises(DstlError):
                await host.parts.persister.persist_claimed(f"nothing-{number}", [host.lost()])
        await host.begin()
        host.clock.advance(2 * HOUR_MS)
        with pytest.raises(NotFoundError):
            await host.parts.catalog.checkpoints("nobody")

        assert host.parts.jobs.names == []

    run(story)


def test_job_of_a_name_is_the_one_that_has_it_now() -> None:
    """A service that knew a deleted job shows the new job of the same name as it is."""

    async def story(host: Host) -> None:
        await host.begin()
        former = await host.parts.catalog.job("job")
        deletions = Deletions(host.store, host.clock, FakeIds(1))
        deletions.collect(deletions.bury("job", "test", 0))
        with pytest.raises(NotFoundError):
            await host.parts.catalog.job("job")

        anew = JobStore(host.store, "job", host.clock, FakeIds(2))
        anew.open(max_parallelism=16)
        epoch, _ = anew.claim("elsewhere")
        found = await host.parts.catalog.job("job")
        assert found.job_uid == anew.job_uid != former.job_uid
        assert (found.epoch, found.max_parallelism, found.latest) == (epoch, 16, None)

    run(story)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_look_whether_the_job_was_deleted_is_kept_for_who_needs_it(*, is_given_up: bool) -> None:
    """I4: neither an abandoned request nor an older owner's takes the deletion check away from the next request."""

    async def story(host: Host) -> None:
        await host.begin()
        jobs, answered = host.parts.jobs, asyncio.Event()
        job = jobs.get("job")

        async def look() -> bool:
            return await answered.wait() and False

        needed = job.look.newest = asyncio.create_task(look())
        asking = asyncio.create_task(jobs.check_not_ended(job))
        await asyncio.sleep(0)
        if is_given_up:
            asking.cancel()
        else:
            jobs.begin_look(job, 1)
            assert job.look.newest is not None
            needed = job.look.newest
        answered.set()
        await asyncio.wait([asking])
        assert job.look.newest is needed
        await jobs.check_not_ended(job)
        assert job.look.newest is None

    run(story)


def test_job_is_reached_when_the_store_has_it() -> None:
    """A service that has reached no job of the store may have wrong credentials; see `IdleWatch`."""
    with service(MemoryStore()) as life:
        jobs = life.parts.jobs
        assert life.client.get("/v1/jobs/job/checkpoints").status_code == 404
        assert not jobs.is_any_reached

        life.open()

        assert jobs.is_any_reached


def test_sets_of_a_deleted_job_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """I9: the bytes in flight are known without visiting each job, and those of a dropped job count no longer."""

    def looked(_: ActiveJobs) -> Iterator[ActiveJob]:
        raise AssertionError("each job is looked at")

    async def story(host: Host) -> None:
        await host.begin()
        jobs = host.parts.jobs
        for number in range(3):
            jobs.get("job").book.receive(segment(number), 0, preemptive=False)
            jobs.get(f"job-{number}").book.receive(segment(number), 0, preemptive=False)
        with monkeypatch.context() as patched:
            patched.setattr(ActiveJobs, "__iter__", looked)
            assert jobs.in_flight_bytes == jobs.in_flight_bytes_of(None) == 60
            waiting = jobs.get("job").changed
        jobs.recreate("job")
        assert waiting.is_set()
        assert (jobs.in_flight_bytes, jobs.in_flight_bytes_of("job")) == (30, 0)
        for number in range(3):
            jobs.recreate(f"job-{number}")

    run(story)


def test_looks_for_a_deletion_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A15: however many checkpoints callers name while the store is slow, one look runs, and one begins after it."""

    async def story(host: Host) -> None:
        await host.begin()
        jobs, looks, answered = host.parts.jobs, [], asyncio.Event()
        job = jobs.get("job")

        async def look(_: ActiveJobs, name: str) -> bool:
            looks.append(name)
            await answered.wait()
            return False

        monkeypatch.setattr(ActiveJobs, "forget_ended", look)
        for checkpoint_id in range(1, 50):
            jobs.begin_look(job, checkpoint_id)
            await asyncio.sleep(0)
        assert len(looks) == 1
        answered.set()
        await jobs.check_not_ended(job)
        assert len(looks) == 2

        jobs.begin_look(job, 50)
        await jobs.check_not_ended(job)
        assert len(looks) == 3

    run(story)
