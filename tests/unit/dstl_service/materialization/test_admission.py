"""Which reported snapshots enter a checkpoint's state, and which are listed as under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dstl_service.formats.manifest import ManifestKind
from dstl_service.formats.materialization_index import MaterializationIndex
from dstl_service.formats.under_way import Announcement, UnderWay, UnderWaySnapshot
from dstl_service.materialization.admission import Reported, choose_materializations
from dstl_service.wire import CheckpointRef
from storage.key_groups import KeyGroupRange
from storage.memory_store import MemoryStore
from storage.model import MaterializationHandle
from storage.testing import FakeClock, Fault, FaultKind, FaultyStore, RecordingStore
from tests.unit.dstl_service.samples import manifest, opened
from tests.unit.dstl_service.snapshots import GROUPS, index_of, store_snapshot


class Coordinator:
    """A job with some checkpoints, each based on the one before; the newest lists all stored snapshots."""

    def __init__(self, checkpoints: int = 4) -> None:
        self.clock = FakeClock()
        self.faulty = FaultyStore(MemoryStore(clock=self.clock))
        self.store = RecordingStore(self.faulty)
        self.jobs = opened(self.store)
        self.refs: list[CheckpointRef] = []
        self.listed: list[UnderWaySnapshot] = []
        for _ in range(checkpoints):
            self.complete()

    def complete(self, *materializations: MaterializationHandle) -> CheckpointRef:
        """Complete the next checkpoint, with these in its state."""
        base = self.refs[-1] if self.refs else None
        checkpoint = manifest(len(self.refs), 1, base, job_uid=self.jobs.job_uid, kind=ManifestKind.COMPLETE)
        under_way = UnderWay(tuple(self.listed))
        made = replace(checkpoint, materializations=materializations, under_way=under_way)
        created, _ = self.jobs.create_manifest(made)
        self.refs.append(created.ref)
        return self.refs[-1]

    def stored(
        self, version: CheckpointRef | None = None, *, listed: bool = True, **changes: Any
    ) -> MaterializationHandle:
        """Store a snapshot of checkpoint 2, or of another, that is under way."""
        index: MaterializationIndex = index_of(version or self.refs[2], **{"job_uid": self.jobs.job_uid, **changes})
        if listed:
            self.listed.append(UnderWaySnapshot("op", index.key_groups, index.version, index.uid))
        return store_snapshot(self.store, index)

    def choose(self, *reported: dict[str, Any], patience_ms: int = 100, at_once: int = 16) -> Reported:
        """Choose which snapshots the checkpoint after the newest accepts."""
        return choose_materializations(
            self.jobs, "job", self.refs[-1], reported, self.clock, patience_ms, at_once=at_once
        )


def announcement(version: CheckpointRef, base: CheckpointRef, uid: str = "new") -> dict[str, Any]:
    """Return the announcement of a snapshot of the whole operator."""
    return Announcement(UnderWaySnapshot("op", GROUPS, version, uid), base).to_dict()


def test_listed_snapshot_is_taken() -> None:
    """A snapshot that the base lists enters once, however many attempts report it, and at any age."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    coordinator.complete()
    coordinator.clock.advance(1 << 50)

    assert coordinator.choose(handle.to_dict(), handle.to_dict()) == Reported([handle], [], set(), 0)


def test_snapshot_that_is_not_listed_is_refused() -> None:
    """I11: a snapshot that the base does not list may be partly deleted, however young and whole it looks."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    coordinator.complete()
    assert coordinator.choose(handle.to_dict()).taken == [handle]
    coordinator.listed.clear()
    coordinator.complete()

    assert coordinator.choose(handle.to_dict()) == Reported([], [], set(), 1)


def test_taken_snapshot_is_neither_taken_nor_refused() -> None:
    """A late report of a snapshot that the state already has does no harm."""
    coordinator = Coordinator()
    handle = coordinator.stored(listed=False)
    coordinator.complete(handle)

    assert coordinator.choose(handle.to_dict()) == Reported([], [], set(), 0)


@pytest.mark.parametrize("changes", [{"job_uid": "another life"}, {"parents": ("gone",)}])
def test_foreign_snapshot_is_refused_for_good(changes: dict[str, Any]) -> None:
    """I11: a snapshot of another life, or based on one that the state has lost, is counted and leaves the list."""
    coordinator = Coordinator()
    good = coordinator.stored(uid="good")
    bad = coordinator.stored(uid="bad", **changes)
    coordinator.complete()

    assert coordinator.choose(bad.to_dict(), good.to_dict()) == Reported([good], [], {"bad"}, 1)


def test_damaged_report_is_refused() -> None:
    """A malformed handle, or one whose index is missing, damaged or elsewhere, is refused without an error."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    missing = coordinator.stored(uid="missing")
    coordinator.store.delete([missing.index_key])
    elsewhere = replace(handle, index_key="other-job/index.json")
    other_size = replace(handle, checkpoint_id=1)
    damaged = coordinator.stored(uid="damaged")
    coordinator.store.put(damaged.index_key, b"{}")
    coordinator.complete()

    reports = [{}, {"uid": 1}, {"base": 1}, elsewhere.to_dict(), other_size.to_dict()]
    assert coordinator.choose(*reports) == Reported([], [], set(), 5)
    assert coordinator.choose(missing.to_dict(), damaged.to_dict()) == Reported([], [], {"missing", "damaged"}, 2)


def test_unreachable_index_is_asked_for_again() -> None:
    """I13: a store that does not answer causes no permanent refusal."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    coordinator.complete()
    coordinator.faulty.inject(Fault("get", FaultKind.FAIL_BEFORE, handle.index_key))

    assert coordinator.choose(handle.to_dict()) == Reported([], [], set(), 0)
    assert coordinator.choose(handle.to_dict()).taken == [handle]


def test_snapshot_is_taken_while_its_parent_is_there() -> None:
    """I11: a snapshot that shares files with another enters only a state that still has that other one."""
    coordinator = Coordinator()
    parent = coordinator.stored(uid="parent", version=coordinator.refs[1], listed=False)
    child = coordinator.stored(uid="child", parents=("parent",))
    coordinator.complete(parent)
    assert coordinator.choose(child.to_dict()).taken == [child]
    coordinator.complete(coordinator.stored(uid="another", key_groups=KeyGroupRange(0, 5), listed=False))

    assert coordinator.choose(child.to_dict()) == Reported([], [], {"child"}, 1)


def test_older_snapshot_is_refused() -> None:
    """A snapshot that is not newer than the state's one of its key groups is not used."""
    coordinator = Coordinator()
    older = coordinator.stored(uid="older", version=coordinator.refs[1])
    coordinator.complete(coordinator.stored(uid="newer", listed=False))

    assert coordinator.choose(older.to_dict()) == Reported([], [], {"older"}, 1)


def test_announcement_is_for_one_base() -> None:
    """I11: an announcement counts for the checkpoint that follows its base, if the snapshot is of the same history."""
    coordinator = Coordinator()
    older, newest = coordinator.refs[1], coordinator.refs[-1]
    good = announcement(older, newest)

    chosen = coordinator.choose(
        good, announcement(older, coordinator.refs[2]), announcement(CheckpointRef(2, 1, "other"), newest)
    )
    assert chosen == Reported([], [Announcement.from_dict(good)], set(), 2)


def test_ancestor_is_known_without_its_manifests() -> None:
    """A coordinator that completed the checkpoints itself reads none of the manifests in between."""
    coordinator = Coordinator(60)
    report = announcement(coordinator.refs[2], coordinator.refs[-1])
    coordinator.jobs.delete_manifests(coordinator.refs[:50])
    assert len(coordinator.choose(report).announced) == 1

    coordinator.jobs = opened(coordinator.store, host=5)
    assert coordinator.choose(report).announced == []


def test_checkpoints_are_looked_up_once_for_all_reports() -> None:
    """C25: a request with many snapshots of old checkpoints takes as long as the way to the oldest, not the product."""
    coordinator = Coordinator(30)
    ancestors, steps = coordinator.jobs.ancestors, []

    def counted(ref: CheckpointRef) -> Iterator[CheckpointRef]:
        for step in ancestors(ref):
            steps.append(step)
            yield step

    coordinator.jobs.ancestors = counted  # type: ignore[method-assign]  # counts the steps
    reports = [announcement(coordinator.refs[n % 20], coordinator.refs[-1], f"u{n}") for n in range(100)]

    assert len(coordinator.choose(*reports).announced) == 100
    assert len(steps) == 30


def test_refused_reports_have_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """C25: a request may report anything, and leaves one line with the first reason and the number."""
    coordinator = Coordinator()
    reports = [announcement(coordinator.refs[1], coordinator.refs[2], f"u{n}") for n in range(100)]

    assert coordinator.choose(*reports).refusals == 100
    (line,) = [record for record in caplog.records if record.message == "materialization refused"]
    assert vars(line)["number"] == 100
    assert "u0 was announced" in vars(line)["error"]


def test_index_is_read_once_and_the_oldest_first() -> None:
    """I13: a handle costs one request in its life; if time is short, the oldest snapshots are checked first."""
    coordinator = Coordinator()
    handles = [
        coordinator.stored(uid=f"m{n}", key_groups=KeyGroupRange(n, n), version=coordinator.refs[1 + n % 2])
        for n in range(40)
    ]
    coordinator.complete()
    oldest_first = sorted(handles, key=lambda handle: (handle.checkpoint_id, handle.uid))
    get = coordinator.faulty.get

    def slow_get(key: str) -> bytes:
        coordinator.clock.advance(10)
        return get(key)

    coordinator.faulty.get = slow_get  # type: ignore[method-assign]  # a store that is slow
    reports = [handle.to_dict() for handle in handles]
    coordinator.store.clear()
    taken = [coordinator.choose(*reports, at_once=1).taken for _ in range(4)]

    assert [len(found) for found in taken] == [11, 22, 33, 40]
    assert taken == [oldest_first[: len(found)] for found in taken]
    assert coordinator.store.count("get", "*.json") == coordinator.store.count("get") == 40
    assert coordinator.store.count("head") == 0


def test_indexes_are_read_at_the_same_time() -> None:
    """I13: many handles take as long as a few, however slow the store is."""
    coordinator = Coordinator()
    handles = [coordinator.stored(uid=f"m{n}", key_groups=KeyGroupRange(n, n)) for n in range(8)]
    coordinator.complete()
    together = threading.Barrier(8)
    get = coordinator.faulty.get

    def get_together(key: str) -> bytes:
        together.wait(60)
        return get(key)

    coordinator.faulty.get = get_together  # type: ignore[method-assign]  # a store that is slow

    assert len(coordinator.choose(*(handle.to_dict() for handle in handles), at_once=8).taken) == 8
