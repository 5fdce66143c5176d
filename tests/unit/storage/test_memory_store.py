"""Stores in memory are shared only by name."""

from __future__ import annotations

from storage.memory_store import MemoryStore, shared_memory_store
from storage.testing import FakeClock


def test_stores_of_one_name_are_one() -> None:
    """All users of a name in this process see the same objects."""
    shared_memory_store("shared-by-test").put("k", b"x")
    assert shared_memory_store("shared-by-test").get("k") == b"x"
    assert list(MemoryStore("shared-by-test").list("")) == []


def test_modified_time_comes_from_clock() -> None:
    """Tests of minimum ages need not wait."""
    clock = FakeClock(5_000)
    store = MemoryStore(clock=clock)
    store.put("old", b"x")
    clock.advance(1_000)
    store.put("new", b"x")
    assert [info.modified_ms for info in store.list("")] == [6_000, 5_000]


def test_objects_deleted_while_listing_are_passed_over() -> None:
    """A listing is not a snapshot, and does not fail."""
    store = MemoryStore()
    for key in ("a", "b", "c"):
        store.put(key, b"x")
    listing = store.list("")
    assert next(listing).key == "a"
    store.delete(["b"])
    assert [info.key for info in listing] == ["c"]
