"""Which reported materializations may enter a checkpoint's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dstl_service.manifest import ManifestKind
from dstl_service.materialization_check import choose_materializations
from dstl_service.materialization_index import AWAITED_AGE_MAX_MS, MaterializationIndex
from dstl_service.wire import CheckpointRef
from storage.memory_store import MemoryStore
from storage.model import KeyGroupRange, MaterializationHandle, ObjectInfo
from storage.testing import FakeClock
from tests.unit.dstl_service.samples import manifest, opened
from tests.unit.dstl_service.snapshots import index_of, store_snapshot

HANDOVER_MS = 1000


class Coordinator:
    """A job with some checkpoints, each on the one before."""

    def __init__(self, checkpoints: int = 4) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(clock=self.clock)
        self.jobs = opened(self.store)
        self.refs: list[CheckpointRef] = []
        for _ in range(checkpoints):
            self.complete()

    def complete(self, *materializations: MaterializationHandle) -> CheckpointRef:
        """Complete the next checkpoint, with these in its state."""
        base = self.refs[-1] if self.refs else None
        checkpoint = manifest(len(self.refs), 1, base, job_uid=self.jobs.job_uid, kind=ManifestKind.COMPLETE)
        created, _ = self.jobs.create(replace(checkpoint, materializations=materializations))
        self.refs.append(created.ref)
        return self.refs[-1]

    def stored(self, version: CheckpointRef | None = None, **changes: Any) -> MaterializationHandle:
        """Store a snapshot of checkpoint 2, or another."""
        index: MaterializationIndex = index_of(version or self.refs[2], **{"job_uid": self.jobs.job_uid, **changes})
        return store_snapshot(self.store, index)

    def choose(self, *reported: dict[str, Any]) -> tuple[list[MaterializationHandle], int]:
        """Choose what follows the newest checkpoint takes in."""
        return choose_materializations(
            self.store, self.jobs, "job", self.refs[-1], reported, self.clock, HANDOVER_MS, 100
        )


def test_snapshot_of_an_ancestor_is_taken() -> None:
    """A snapshot of a checkpoint on the way to the base enters, once, however many attempts report it."""
    coordinator = Coordinator()
    handle = coordinator.stored()

    assert coordinator.choose(handle.to_dict(), handle.to_dict()) == ([handle], 0)


def test_taken_snapshot_is_neither_taken_nor_refused() -> None:
    """A task that reports late what the state has already does no harm."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    coordinator.complete(handle)

    assert coordinator.choose(handle.to_dict()) == ([], 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": CheckpointRef(2, 1, "other")},
        {"version": CheckpointRef(9, 0, "later")},
        {"job_uid": "another life"},
        {"key_groups": KeyGroupRange(0, 128)},
        {"parents": ("gone",)},
    ],
)
def test_foreign_snapshot_is_refused(changes: dict[str, Any]) -> None:
    """I4, I11: a snapshot of an aborted history, of another job or of key groups that are none is counted, no more."""
    coordinator = Coordinator()
    good = coordinator.stored(uid="good")
    bad = coordinator.stored(uid="bad", **changes)

    assert coordinator.choose(bad.to_dict(), good.to_dict()) == ([good], 1)


def test_damaged_report_is_refused() -> None:
    """A handle that is none, or whose index is missing, damaged or elsewhere, is refused without an error."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    missing = replace(handle, uid="missing", index_key=handle.index_key.replace("uid", "missing"))
    elsewhere = replace(handle, index_key="other-job/index.json")
    coordinator.store.put(coordinator.stored(uid="damaged").index_key, b"{}")
    damaged = replace(handle, uid="damaged", index_key=handle.index_key.replace("uid", "damaged"))

    reports = [{}, {"uid": 1}, missing.to_dict(), elsewhere.to_dict(), damaged.to_dict()]
    assert coordinator.choose(*reports) == ([], 5)


def test_old_snapshot_is_refused() -> None:
    """I11: what the garbage collector may be about to take enters no state."""
    coordinator = Coordinator(6)
    handle = coordinator.stored()
    coordinator.clock.advance(HANDOVER_MS)
    assert coordinator.choose(handle.to_dict()) == ([handle], 0)
    coordinator.clock.advance(1)

    assert coordinator.choose(handle.to_dict()) == ([], 1)


def test_old_snapshot_of_the_newest_checkpoints_is_taken() -> None:
    """I13: a snapshot for which the next checkpoint is one of the first to come is taken hours later, too."""
    coordinator = Coordinator()
    handle = coordinator.stored()
    coordinator.clock.advance(AWAITED_AGE_MAX_MS // 2)
    assert coordinator.choose(handle.to_dict()) == ([handle], 0)
    coordinator.clock.advance(1)

    assert coordinator.choose(handle.to_dict()) == ([], 1)


def test_snapshot_is_taken_while_its_parent_is_there() -> None:
    """I11: a snapshot that shares files with another enters only a state that still has that other one."""
    coordinator = Coordinator()
    parent = coordinator.stored(uid="parent", version=coordinator.refs[1])
    child = coordinator.stored(uid="child", parents=("parent",))
    coordinator.complete(parent)
    assert coordinator.choose(child.to_dict()) == ([child], 0)
    coordinator.complete(coordinator.stored(uid="another", key_groups=KeyGroupRange(0, 5)))

    assert coordinator.choose(child.to_dict()) == ([], 1)


def test_older_snapshot_is_refused() -> None:
    """A snapshot that is no newer than what the state has of its key groups is of no use."""
    coordinator = Coordinator()
    older = coordinator.stored(uid="older", version=coordinator.refs[1])
    coordinator.complete(coordinator.stored(uid="newer"))

    assert coordinator.choose(older.to_dict()) == ([], 1)


def test_ancestor_is_known_without_its_manifests() -> None:
    """A coordinator that completed the checkpoints itself needs none of the manifests in between."""
    coordinator = Coordinator(60)
    handle = coordinator.stored()
    coordinator.jobs.delete_manifests(coordinator.refs[:50])
    assert coordinator.choose(handle.to_dict()) == ([handle], 0)

    coordinator.jobs = opened(coordinator.store, host=5)
    assert coordinator.choose(handle.to_dict()) == ([], 1)


def test_slow_store_leaves_handles_for_later() -> None:
    """I13: when looking at handles takes too long, the checkpoint takes those looked at; the others come again."""
    coordinator = Coordinator()
    clock = coordinator.clock

    class SlowStore(MemoryStore):
        def head(self, key: str) -> ObjectInfo:
            clock.advance(60)
            return coordinator.store.head(key)

        def get(self, key: str) -> bytes:
            return coordinator.store.get(key)

    handles = [coordinator.stored(uid=f"m{n}", key_groups=KeyGroupRange(n, n)) for n in range(4)]
    reports = [handle.to_dict() for handle in handles]
    chosen = choose_materializations(
        SlowStore(), coordinator.jobs, "job", coordinator.refs[-1], reports, clock, HANDOVER_MS, 100
    )

    assert chosen == (handles[:2], 0)
