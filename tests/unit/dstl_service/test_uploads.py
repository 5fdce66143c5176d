"""Uploads whose attempts may overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dstl_service.uploads import Uploader
from storage.errors import DstlError, InvalidInputError, UnavailableError
from storage.memory_store import MemoryStore
from storage.model import SegmentHandle
from storage.retry_policy import RetryPolicy
from storage.segment_reader import read_segments
from storage.testing import FakeIds, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.samples import segment

HEDGED = RetryPolicy(timeout_ms=100, attempts_max=3, delay_after_error_ms=1)
PATIENT = RetryPolicy(timeout_ms=10_000, attempts_max=3, delay_after_error_ms=1)
SETS = [segment(0, b"zero"), segment(1, b"one")]


class Bench:
    """An uploader on a store that fails by script; counts what reaches the store."""

    def __init__(self, policy: RetryPolicy, threads: int, *faults: Fault) -> None:
        self.inner = MemoryStore()
        self.faulty = FaultyStore(self.inner, *faults)
        self.store = RecordingStore(self.faulty)
        self.executor = ThreadPoolExecutor(threads)
        self.uploader = Uploader(self.store, self.executor, policy, FakeIds(), "host")

    def upload(self) -> list[SegmentHandle]:
        """Upload the sets in an event loop of its own."""
        return asyncio.run(self.uploader.upload("job", SETS))[0]

    def payloads(self, handles: list[SegmentHandle]) -> list[bytes]:
        """Read back what the handles point at."""
        return [bytes(payload) for _, payload in read_segments(self.inner, handles)]


@contextmanager
def bench(policy: RetryPolicy, *faults: Fault, threads: int = 3) -> Iterator[Bench]:
    """Give a bench, and end its threads."""
    made = Bench(policy, threads, *faults)
    try:
        yield made
    finally:
        made.faulty.heal()
        made.executor.shutdown()


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
    with bench(HEDGED, Fault("put", FaultKind.DELAY)) as made:
        handles = made.upload()

        assert made.payloads(handles) == [b"zero", b"one"]
        assert made.store.count("put") >= 2


def test_late_loser_changes_nothing() -> None:
    """I6: an attempt that ends after another one won wrote the same bytes to the same key."""
    with bench(HEDGED, Fault("put", FaultKind.DELAY)) as made:
        handles = made.upload()
        before = made.inner.get(handles[0].object_key)
        made.faulty.heal()
        made.executor.shutdown(wait=True)

        assert len(set(made.store.keys("put"))) == 1
        assert made.inner.get(handles[0].object_key) == before


def test_last_attempt_gets_its_time() -> None:
    """I6: two attempts may hang, the third still wins."""
    with bench(HEDGED, Fault("put", FaultKind.DELAY, times=2)) as made:
        assert made.payloads(made.upload()) == [b"zero", b"one"]
        assert made.store.count("put") == 3


def test_all_attempts_hang() -> None:
    """I6: when no attempt ends in time, the upload fails; nothing waits for ever."""
    with (
        bench(HEDGED, Fault("put", FaultKind.DELAY, times=None)) as made,
        pytest.raises(UnavailableError, match="3 attempts"),
    ):
        made.upload()


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER])
@pytest.mark.parametrize("failures", [1, 2])
def test_error_is_retried(kind: FaultKind, failures: int) -> None:
    """I6: errors are retried, not only time-outs; a lost response too."""
    with bench(PATIENT, Fault("put", kind, times=failures)) as made:
        assert made.payloads(made.upload()) == [b"zero", b"one"]
        assert made.store.count("put") == failures + 1
        assert len(set(made.store.keys("put"))) == 1


def test_error_is_retried_after_delay() -> None:
    """The attempt after an error waits, so that a store in trouble is not asked at once."""
    policy = RetryPolicy(timeout_ms=10_000, attempts_max=2, delay_after_error_ms=30)

    async def timed(made: Bench) -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await made.uploader.upload("job", SETS)
        return loop.time() - began

    with bench(policy, Fault("put", FaultKind.FAIL_BEFORE)) as made:
        assert asyncio.run(timed(made)) >= 0.029


def test_error_while_attempt_hangs() -> None:
    """I6: a hung first and a failing second attempt leave the third one to win."""
    with bench(HEDGED, Fault("put", FaultKind.DELAY), Fault("put", FaultKind.FAIL_BEFORE)) as made:
        assert made.payloads(made.upload()) == [b"zero", b"one"]
        assert made.store.count("put") == 3


def test_all_attempts_fail() -> None:
    """When every attempt fails, the upload's error says how many there were and why the last one failed."""
    with bench(PATIENT, Fault("put", FaultKind.FAIL_BEFORE, times=None)) as made:
        with pytest.raises(UnavailableError, match="3 attempts: injected fault"):
            made.upload()
        assert made.store.count("put") == 3


@pytest.mark.parametrize("error", [InvalidInputError("no"), ValueError("bug")])
def test_lasting_error_is_not_retried(error: Exception) -> None:
    """An error that a repetition cannot heal ends the upload at once, as it is."""
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
            asyncio.run(made.uploader.upload("job", [one]))
        assert made.store.count("put") == 0
