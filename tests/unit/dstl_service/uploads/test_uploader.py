"""Uploads whose attempts may overlap."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from dstl_service.process.fair_slots import FairSlots
from dstl_service.uploads.hedging import DELAY_MS_MIN, SAMPLES_MIN
from dstl_service.uploads.uploader import ThreadPerCall, Upload, Uploader
from storage.errors import DstlError, InvalidInputError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import Segment, SegmentHandle
from storage.retry_policy import RetryPolicy
from storage.segment_reader import read_segments
from storage.testing import FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.samples import segment
from tools.virtual_time import VirtualLoop

_T = TypeVar("_T")

HEDGED = RetryPolicy(timeout_ms=100, attempts_max=3, delay_after_error_ms=1)
PATIENT = RetryPolicy(timeout_ms=10_000, attempts_max=3, delay_after_error_ms=1)
SETS = [segment(0, b"zero"), segment(1, b"one")]


class Bench:
    """An uploader on a store that fails by script; counts the calls that reach the store."""

    def __init__(self, policy: RetryPolicy, executor: Executor, *faults: Fault, **limits: Any) -> None:
        self.inner = MemoryStore()
        self.faulty = FaultyStore(self.inner, *faults)
        self.store = RecordingStore(self.faulty)
        self.executor = executor
        self.uploader = Uploader(self.store, self.executor, policy, FakeIds(), "host", **limits)

    def upload(self, *segments: Segment) -> list[SegmentHandle]:
        """Upload sets in an event loop of its own."""

        async def stored() -> list[SegmentHandle]:
            return await self.uploader.begin("job", segments or SETS).stored()

        return asyncio.run(stored())

    def payloads(self, handles: list[SegmentHandle]) -> list[bytes]:
        """Read back the sets that the handles point at."""
        return [bytes(payload) for _, payload in read_segments(self.inner, handles)]


@contextmanager
def bench(
    policy: RetryPolicy, *faults: Fault, threads: int = 3, executor: Executor | None = None, **limits: int
) -> Iterator[Bench]:
    """Yield a bench; end its threads afterwards."""
    made = Bench(policy, executor or ThreadPoolExecutor(threads), *faults, **limits)
    try:
        yield made
    finally:
        made.faulty.heal()
        made.executor.shutdown()


class TimedBench(Bench):
    """A bench in virtual time, for one test: attempts take no time, but the first `hangs` hang until `heal`."""

    def __init__(self, policy: RetryPolicy, *faults: Fault, hangs: int = 0, **limits: float) -> None:
        super().__init__(policy, ThreadPerCall("is not used"), *faults, **limits)
        self.begun_s: list[float] = []
        """When each attempt started."""
        self._hangs = hangs
        self._hung: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._loop = VirtualLoop(self._call)

    def tell(self, story: Callable[[TimedBench, Upload], Awaitable[_T]]) -> _T:
        """Run the coroutine of an upload."""

        async def told() -> _T:
            return await story(self, self.uploader.begin("job", SETS))

        try:
            return self._loop.run_until_complete(told())
        finally:
            self._loop.close()

    def heal(self) -> None:
        """Release the hung attempts; none hangs from now on."""
        self._hangs = 0
        for call, attempt in self._hung:
            self._end(call, attempt)
        self._hung = []

    def _call(self, call: Callable[[], Any], attempt: asyncio.Future[Any]) -> None:
        self.begun_s.append(self._loop.time())
        if len(self.begun_s) <= self._hangs:
            self._hung.append((call, attempt))
        else:
            self._end(call, attempt)

    def _end(self, call: Callable[[], Any], attempt: asyncio.Future[Any]) -> None:
        try:
            attempt.set_result(call())
        except Exception as error:  # noqa: BLE001 - is the attempt's, as a thread's is
            attempt.set_exception(error)


async def stored_payloads(made: TimedBench, upload: Upload) -> list[bytes]:
    """Return what an upload stored."""
    return made.payloads(await upload.stored())


def test_sets_share_one_object() -> None:
    """A batch becomes one object, named by job, host and a unique id, and each set gets its handle."""
    with bench(PATIENT) as made:
        handles = made.upload()

        assert {handle.object_key for handle in handles} == {f"job/segments/host/{1:032x}.seg"}
        assert [handle.entry.id for handle in handles] == [one.id for one in SETS]
        assert made.payloads(handles) == [b"zero", b"one"]
        assert made.store.count("put") == 1


def test_hung_attempt_is_overtaken() -> None:
    """I6: while the first attempt hangs, the second one stores the batch."""
    made = TimedBench(HEDGED, hangs=1)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 0.1])


def used_to(made: TimedBench, duration_ms: float) -> TimedBench:
    """Return a bench whose uploader has seen attempts of this duration."""
    for _ in range(SAMPLES_MIN):
        made.uploader.hedging.attempt_ended(100, duration_ms)
    return made


def test_slow_attempt_is_joined_early() -> None:
    """I6: an attempt that takes longer than most is joined by another one, long before it counts as late."""
    made = used_to(TimedBench(PATIENT, hangs=1, hedge_share_max=0.5), 40)

    async def story(made: TimedBench, upload: Upload) -> tuple[int, int, int]:
        await upload.stored()
        return upload.attempts, upload.tries, upload.winner

    assert made.tell(story) == (2, 1, 2)
    assert made.begun_s == pytest.approx([0, 0.04])


def test_early_attempt_is_not_counted_as_a_try() -> None:
    """I6: if the early attempt hangs as well, the retry policy has all its attempts, at its own times."""
    made = used_to(TimedBench(HEDGED, hangs=3, hedge_share_max=0.5), 40)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 0.04, 0.1, 0.2])


def test_no_early_attempt_beyond_the_share() -> None:
    """I6: a store that is slow as a whole gets early attempts for a share of the uploads, and then none."""
    made = used_to(TimedBench(PATIENT, hangs=1_000, hedge_share_max=0.25), 40)

    async def story(made: TimedBench, upload: Upload) -> int:
        uploads = [upload, *(made.uploader.begin("job", SETS) for _ in range(9))]
        waiting = asyncio.gather(*(one.stored() for one in uploads))
        await asyncio.sleep(1)
        hedges = sum(one.hedges for one in uploads)
        made.heal()
        await waiting
        return hedges

    assert made.tell(story) == 3


def test_durations_of_uploads_are_measured() -> None:
    """Later attempts are compared with the durations of earlier ones, winners or not, but not of failed ones."""
    made = TimedBench(HEDGED, Fault("put", FaultKind.FAIL_BEFORE, times=1), hedge_share_max=0.5)

    async def story(made: TimedBench, upload: Upload) -> None:
        await upload.stored()
        for _ in range(SAMPLES_MIN - 2):
            await made.uploader.begin("job", SETS).stored()
        assert made.uploader.hedging.delay_ms(100) is None
        await made.uploader.begin("job", SETS).stored()
        assert made.uploader.hedging.delay_ms(100) == DELAY_MS_MIN

    made.tell(story)


def test_late_loser_changes_nothing() -> None:
    """I6: an attempt that ends after another one won wrote the same bytes to the same key."""

    async def story(made: TimedBench, upload: Upload) -> None:
        handles = await upload.stored()
        before = made.inner.get(handles[0].object_key)
        made.heal()
        assert not await upload.ended()
        assert made.inner.get(handles[0].object_key) == before

    made = TimedBench(HEDGED, hangs=1)
    made.tell(story)
    assert made.store.count("put") == 2
    assert len(set(made.store.keys("put"))) == 1


def test_last_attempt_gets_its_time() -> None:
    """I6: two attempts may hang, the third still wins."""
    made = TimedBench(HEDGED, hangs=2)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 0.1, 0.2])


def test_all_attempts_hang() -> None:
    """I6: when no attempt ends in time, the upload fails; no caller waits forever."""

    async def story(_: TimedBench, upload: Upload) -> float:
        with pytest.raises(UnavailableError, match="3 attempts"):
            await upload.stored()
        return asyncio.get_running_loop().time()

    assert TimedBench(HEDGED, hangs=3).tell(story) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("failures", [1, 4])
def test_error_is_retried(kind: FaultKind, failures: int) -> None:
    """I6: errors are retried like time-outs, and so is a lost response. No attempt follows the successful one."""
    policy = RetryPolicy(timeout_ms=10_000, attempts_max=5, delay_after_error_ms=1)
    with bench(policy, Fault("put", kind, times=failures)) as made:
        assert made.payloads(made.upload()) == [b"zero", b"one"]
        assert made.store.count("put") == failures + 1
        assert len(set(made.store.keys("put"))) == 1


def test_error_is_retried_after_delay() -> None:
    """The attempt after an error is delayed, so that a failing store is not called again at once."""
    policy = RetryPolicy(timeout_ms=10_000, attempts_max=2, delay_after_error_ms=30)
    made = TimedBench(policy, Fault("put", FaultKind.FAIL_BEFORE))

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 0.03])


def test_attempt_after_time_out_does_not_wait() -> None:
    """The delay applies to errors: the attempt after a late one starts at once, while the first continues."""
    policy = RetryPolicy(timeout_ms=1_000, attempts_max=2, delay_after_error_ms=3_600_000)
    made = TimedBench(policy, hangs=1)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 1])
    assert made.uploader.attempts_running == 1


def test_next_attempt_waits_for_time_out() -> None:
    """The second attempt starts no earlier than after the time reserved for the first one."""
    policy = RetryPolicy(timeout_ms=1_000, attempts_max=2, delay_after_error_ms=0)
    made = TimedBench(policy, hangs=1)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 1])


def test_single_attempt_is_not_repeated() -> None:
    """With one attempt an error ends the upload: nothing is retried, nothing is hedged."""
    policy = RetryPolicy(timeout_ms=10_000, attempts_max=1, delay_after_error_ms=1)
    with bench(policy, Fault("put", FaultKind.FAIL_BEFORE)) as made:
        with pytest.raises(UnavailableError, match="1 attempts"):
            made.upload()
        assert made.store.count("put") == 1


def test_attempt_that_cannot_start_is_an_error() -> None:
    """An executor that accepts no more calls, for example without threads, fails the upload; no attempt is counted."""
    with bench(PATIENT) as made:
        made.executor.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            made.upload()
        assert made.uploader.attempts_running == 0
        assert all(made.uploader.slots.acquire_at_once("job") for _ in range(5))


def test_job_whose_uploads_hang_leaves_others_their_places() -> None:
    """I6, B13: one job has neither all slots nor all attempts."""

    async def run(made: Bench) -> list[bool]:
        uploads = [asyncio.create_task(made.uploader.begin("hanging", SETS).stored()) for _ in range(20)]
        await asyncio.sleep(0)
        stored = [bool(await asyncio.wait_for(made.uploader.begin("other", SETS).stored(), 60))]
        for upload in uploads:
            upload.cancel()
        await asyncio.gather(*uploads, return_exceptions=True)
        made.uploader.slots = FairSlots(20)  # the threads still hang
        refused = [asyncio.ensure_future(made.uploader.attempt("hanging", "hanging/x", [b"x"])) for _ in range(8)]
        await asyncio.sleep(0)
        assert any(attempt.done() and "hang already" in str(attempt.result()) for attempt in refused)
        return [*stored, bool(await asyncio.wait_for(made.uploader.begin("other", SETS).stored(), 60))]

    with bench(
        PATIENT,
        Fault("put", FaultKind.DELAY, "hanging/*", times=None),
        threads=16,
        slots=5,
        attempts_running_max=8,
    ) as made:
        assert asyncio.run(run(made)) == [True, True]


def test_winner_is_named() -> None:
    """The result of an upload says which attempt stored the object, and how many were started."""

    async def story(_: TimedBench, upload: Upload) -> tuple[int, int]:
        await upload.stored()
        return upload.winner, upload.attempts

    assert TimedBench(HEDGED, hangs=2).tell(story) == (3, 3)


def test_error_while_attempt_hangs() -> None:
    """I6: after a hung first and a failing second attempt, the third one wins."""
    made = TimedBench(HEDGED, Fault("put", FaultKind.FAIL_BEFORE), hangs=1)

    assert made.tell(stored_payloads) == [b"zero", b"one"]
    assert made.begun_s == pytest.approx([0, 0.1, 0.101])


def test_all_attempts_fail() -> None:
    """When every attempt fails, the upload's error says how many there were and why the last one failed."""
    with bench(PATIENT, Fault("put", FaultKind.FAIL_BEFORE, times=None)) as made:
        with pytest.raises(UnavailableError, match="3 attempts: injected fault"):
            made.upload()
        assert made.store.count("put") == 3


@pytest.mark.parametrize("error", [InvalidInputError("no"), ValueError("bug")])
def test_lasting_error_is_not_retried(error: Exception) -> None:
    """An error that a retry cannot fix ends the upload at once, unchanged."""
    with bench(PATIENT, Fault("put", FaultKind.FAIL_BEFORE, error=lambda: error)) as made:
        with pytest.raises(type(error), match=str(error)):
            made.upload()
        assert made.store.count("put") == 1


def test_damaged_payload_is_not_uploaded() -> None:
    """I10: a set whose bytes changed since they were received never reaches the store."""
    payload = bytearray(b"good")
    one = segment(payload=payload)
    payload[0] ^= 1
    with bench(PATIENT) as made:
        with pytest.raises(DstlError):
            made.upload(one)
        assert made.store.count("put") == 0


def test_attempt_after_give_up_counts() -> None:
    """I7: an attempt that succeeds after its upload was given up has stored the batch, and the service notices it."""

    async def story(made: TimedBench, upload: Upload) -> bool:
        with pytest.raises(UnavailableError):
            await upload.stored()
        made.heal()
        return await upload.ended()

    assert TimedBench(HEDGED, hangs=3).tell(story)


def test_failed_attempts_store_nothing() -> None:
    """An upload whose every attempt failed does not count as stored, whatever its late attempts raise."""

    async def story(made: TimedBench, upload: Upload) -> bool:
        with pytest.raises(UnavailableError):
            await upload.stored()
        made.heal()
        return await upload.ended()

    unforeseen = Fault("put", FaultKind.FAIL_BEFORE, times=None, error=lambda: ValueError("late"))
    assert not TimedBench(HEDGED, unforeseen, hangs=3).tell(story)


def test_hung_uploads_let_others_pass() -> None:
    """I6: uploads with attempts that hang forever hold their slots for at most one time-out; no upload starves."""
    slots = 2

    async def run(made: Bench) -> list[SegmentHandle]:
        hung = [asyncio.create_task(made.uploader.begin("hung", SETS).stored()) for _ in range(3 * slots)]
        handles = await asyncio.wait_for(made.uploader.begin("job", SETS).stored(), 60)
        with pytest.raises(UnavailableError):
            await asyncio.gather(*hung)
        await asyncio.wait(hung)
        return handles

    fault = Fault("put", FaultKind.DELAY, "hung/*", times=None)
    with bench(HEDGED, fault, threads=64, slots=slots) as made:
        assert made.payloads(asyncio.run(run(made))) == [b"zero", b"one"]


def test_slots_bound_uploads_at_once() -> None:
    """While the store is merely slow, no more uploads run than there are slots."""

    async def run(made: Bench) -> None:
        uploads = [asyncio.create_task(made.uploader.begin("job", SETS).stored()) for _ in range(6)]
        while made.store.count("put") < 2:  # noqa: ASYNC110 - counted in other threads
            await asyncio.sleep(0.001)
        assert made.uploader.attempts_running == 2
        made.faulty.heal()
        await asyncio.gather(*uploads)

    with bench(PATIENT, Fault("put", FaultKind.DELAY, times=2), threads=8, slots=2) as made:
        asyncio.run(run(made))
        assert made.store.count("put") == 6


def test_threads_of_hung_attempts_are_bounded() -> None:
    """I6: a hung store occupies a bounded number of threads; later uploads fail, and their sets are kept."""

    async def run(made: Bench) -> None:
        hung = [asyncio.create_task(made.uploader.begin(job, SETS).stored()) for job in "abcdef"]
        await asyncio.wait(hung)
        with pytest.raises(UnavailableError, match="hang already"):
            await made.uploader.begin("job", SETS).stored()
        assert made.uploader.attempts_running == 5

    with bench(HEDGED, Fault("put", FaultKind.DELAY, times=None), threads=64, attempts_running_max=5) as made:
        asyncio.run(run(made))
        assert made.store.count("put") == 5


def test_failed_attempt_keeps_no_bytes() -> None:
    """I9: after a failed upload, only the change-set tracker holds its bytes: no error, traceback or cycle does."""

    class Payload(bytearray):
        """Bytes that can be weakly referenced."""

    payload = Payload(b"payload")
    watched = weakref.ref(payload)
    one = segment(payload=payload)
    fault = Fault("put", FaultKind.FAIL_BEFORE, times=None)
    with bench(PATIENT, fault, executor=ThreadPerCall("test")) as made:  # whose threads keep no references

        async def run(*segments: Segment) -> None:
            upload = made.uploader.begin("job", segments)
            with pytest.raises(UnavailableError):
                await upload.stored()
            await upload.ended()

        gc.disable()
        try:
            asyncio.run(run(one))
            del one, payload
            assert watched() is None
        finally:
            gc.enable()
