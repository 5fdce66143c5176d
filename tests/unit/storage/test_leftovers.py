"""Only the leftovers of killed processes are deleted from a store."""

from __future__ import annotations

from storage.leftovers import remove_leftovers
from storage.memory_store import MemoryStore
from storage.testing import FakeClock

PROBE = f"probe/{1:032x}"


def test_old_probe_is_deleted() -> None:
    """I12: a probe object older than any call is deleted."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    store.put(PROBE, b"first")

    assert remove_leftovers(store, clock, 1000) == 0
    clock.advance(1000)
    assert remove_leftovers(store, clock, 1000) == 1

    assert list(store.list("")) == []


def test_job_called_probe_stays() -> None:
    """I11: objects of a job named like the folder of probes are not leftovers."""
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    kept = ["probe/job.json", f"probe/epochs/{1:020d}.json", f"probe/segments/host/{1:032x}.seg"]
    for key in kept:
        store.put(key, b"x")
    clock.advance(10**9)

    assert remove_leftovers(store, clock, 0) == 0

    assert [info.key for info in store.list("")] == sorted(kept)
