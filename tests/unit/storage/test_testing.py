"""The test doubles do what their script says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError

import pytest

from storage.errors import InvalidInputError, NotFoundError, OverloadedError, UnavailableError
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, FakeIds, Fault, FaultKind, FaultyStore, RecordedCall, RecordingStore


def test_fault_before_has_no_effect() -> None:
    """A failed put stored nothing; the next one succeeds."""
    inner = MemoryStore()
    store = FaultyStore(inner, Fault("put", FaultKind.FAIL_BEFORE))
    with pytest.raises(UnavailableError):
        store.put("k", b"x")
    assert list(inner.list("")) == []
    store.put("k", b"x")


def test_fault_after_has_taken_effect() -> None:
    """A lost response does not undo the put or the deletion."""
    inner = MemoryStore()
    store = FaultyStore(inner, Fault("put", FaultKind.FAIL_AFTER), Fault("delete", FaultKind.FAIL_AFTER))
    with pytest.raises(UnavailableError):
        store.put("k", b"x")
    assert inner.get("k") == b"x"
    with pytest.raises(UnavailableError):
        store.delete(["k"])
    with pytest.raises(NotFoundError):
        inner.get("k")


def test_partial_write_leaves_a_part() -> None:
    """A store that is not atomic can be simulated."""
    inner = MemoryStore()
    store = FaultyStore(inner, Fault("put", FaultKind.PARTIAL_WRITE, kept_bytes=3))
    with pytest.raises(UnavailableError):
        store.put("k", [b"ab", b"cdef"])
    assert inner.get("k") == b"abc"
    with pytest.raises(InvalidInputError):
        Fault("get", FaultKind.PARTIAL_WRITE)


def test_faults_match_operation_key_and_turn() -> None:
    """A fault affects only its operation and keys, after its skips, and as often as set."""
    fault = Fault("get", FaultKind.FAIL_BEFORE, "a/*", times=2, skip=1, error=lambda: OverloadedError("full"))
    store = FaultyStore(MemoryStore(), fault)
    store.put("a/1", b"x")
    store.put("b/1", b"x")
    outcomes = []
    for _ in range(5):
        store.get("b/1")
        try:
            outcomes.append(store.get("a/1"))
        except OverloadedError:
            outcomes.append(b"failed")
    assert outcomes == [b"x", b"failed", b"failed", b"x", b"x"]


def test_fault_without_end_lasts_until_healed() -> None:
    """A fault without a count is an outage."""
    store = FaultyStore(MemoryStore(), Fault("list", FaultKind.FAIL_BEFORE, times=None))
    for _ in range(3):
        with pytest.raises(UnavailableError):
            store.list("")
    store.heal()
    assert list(store.list("")) == []


def test_delayed_call_waits_for_release() -> None:
    """A hung put takes effect only when it is released; a delay in ms ends by itself."""
    inner = MemoryStore()
    store = FaultyStore(inner, Fault("put", FaultKind.DELAY), Fault("get", FaultKind.DELAY, delay_ms=1))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, "k", b"x")
        with pytest.raises(NotDoneError):
            put.result(timeout=0.02)
        assert list(inner.list("")) == []
        store.release()
        put.result(timeout=10)
    store.inject()
    assert store.get("k") == b"x"


def test_recording_store_remembers_calls() -> None:
    """Calls are recorded in order, including failed ones, with keys and bytes."""
    store = RecordingStore(MemoryStore())
    store.put("a/1", [b"12", b"3"])
    store.get_range("a/1", 0, 2)
    with pytest.raises(NotFoundError):
        store.get("none")
    store.delete(["a/1", "a/2"])
    assert store.calls == (
        RecordedCall("put", "a/1", 3),
        RecordedCall("get_range", "a/1", 2),
        RecordedCall("get", "none"),
        RecordedCall("delete", "a/1"),
        RecordedCall("delete", "a/2"),
    )
    assert store.count("delete", "a/*") == 2
    assert store.keys("delete", "*2") == ["a/2"]
    store.clear()
    assert not store.calls


def test_fake_clock_moves_when_told() -> None:
    """Both times advance together, and never go back."""
    clock = FakeClock(1_000)
    clock.advance(5)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_005, 5)
    with pytest.raises(InvalidInputError):
        clock.advance(-1)


def test_fake_ids_ascend_and_differ_by_host() -> None:
    """Fake ids have the form of real ones, and are predictable."""
    ids = FakeIds(host=2)
    assert [ids.unique_id(), ids.unique_id()] == [f"0002{1:028x}", f"0002{2:028x}"]
    assert FakeIds(host=1).unique_id() != ids.unique_id()
