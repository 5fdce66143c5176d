"""Orphans are found and deleted; what a checkpoint names, or may yet come to name, stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.garbage_collector import ORPHAN_AGE_MIN_MS, GarbageReport, collect_garbage
from dstl_service.job_store import JobStore
from dstl_service.manifest import Manifest, ManifestKind
from storage.errors import CorruptDataError
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, KeyGroupRange, Segment, SegmentHandle, Writer
from storage.object_store import ObjectStore
from storage.open import open_store
from storage.segment_format import encode_object
from storage.testing import FakeClock, FakeIds

AGE = ORPHAN_AGE_MIN_MS


class World:
    """A job with a clock of its own, whose checkpoints and orphans are made step by step."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.clock = FakeClock(1_000_000_000)
        self.ids = FakeIds()
        self.store = store or MemoryStore(clock=self.clock, ids=self.ids)
        self.jobs = JobStore(self.store, "job", self.clock, self.ids)
        self.jobs.open(None)
        self.epoch, self.newest = self.jobs.claim("test")

    def object(self, checkpoint_id: int) -> SegmentHandle:
        """Store a segment object that nobody names yet."""
        set_id = ChangeSetId("job", "op", checkpoint_id, Writer(self.epoch, 1), 0, 0)
        buffers, entries = encode_object([Segment.of(set_id, KeyGroupRange(0, 127), 1, b"payload")])
        key = f"job/segments/host/{self.ids.unique_id()}.seg"
        self.store.put(key, buffers)
        return SegmentHandle(key, sum(map(len, buffers)), entries[0])

    def complete(self, *handles: SegmentHandle, kind: ManifestKind = ManifestKind.DELTA) -> None:
        """Complete the next checkpoint with these handles."""
        base = self.newest
        earlier = () if base is None or kind is ManifestKind.DELTA else (*base.earlier, *base.segments)
        self.newest = self.jobs.create(
            Manifest(
                kind=kind,
                job_uid=self.jobs.job_uid,
                id=base.id + 1 if base else 0,
                generation=0,
                uid=self.ids.unique_id(),
                epoch=self.epoch,
                created_ms=0,
                base=base.ref if base else None,
                segments=handles,
                earlier=earlier,
            )
        )

    def collect(self, *, dry_run: bool = False) -> GarbageReport:
        """Collect garbage."""
        return collect_garbage(self.store, self.jobs, "job", self.clock, dry_run=dry_run)

    def stored(self) -> set[str]:
        """Return the segment objects that are there."""
        return {info.key for info in self.store.list("job/segments/")}


def test_old_orphan_is_deleted() -> None:
    """An object that no checkpoint names is deleted once it is old enough (I12)."""
    world = World()
    named, orphan = world.object(0), world.object(0)
    world.complete(named)
    world.clock.advance(AGE)

    report = world.collect()

    assert report.orphans == [orphan.object_key]
    assert report.orphan_bytes == orphan.object_size_bytes
    assert world.stored() == {named.object_key}


def test_young_object_stays() -> None:
    """An object that a running checkpoint may still come to name stays, although nothing names it (I11)."""
    world = World()
    world.complete(world.object(0))
    world.clock.advance(AGE)
    young = world.object(1)
    world.clock.advance(AGE - 1)

    report = world.collect()

    assert (report.young, report.orphans) == (1, [])
    assert young.object_key in world.stored()


def test_whole_log_stays_behind_complete_manifest() -> None:
    """Objects of checkpoints before a complete manifest are named by it, however old (I11)."""
    world = World()
    handles = [world.object(number) for number in range(3)]
    world.complete(handles[0])
    world.complete(handles[1], kind=ManifestKind.COMPLETE)
    world.complete(handles[2])
    world.clock.advance(10 * AGE)

    assert world.collect().orphans == []
    assert world.stored() == {handle.object_key for handle in handles}


def test_dry_run_deletes_nothing() -> None:
    """A dry run reports the orphans and leaves them."""
    world = World()
    orphan = world.object(0)
    world.clock.advance(AGE)

    assert world.collect(dry_run=True).orphans == [orphan.object_key]
    assert world.stored() == {orphan.object_key}


def test_damaged_manifest_stops_collection() -> None:
    """If a manifest of the chain cannot be read, nothing is deleted (I11)."""
    world = World()
    world.complete(world.object(0))
    orphan = world.object(0)
    world.clock.advance(AGE)
    key = next(info.key for info in world.store.list("job/checkpoints/00000000000000000000.000001"))
    world.store.delete([key])
    world.store.put(key, b"damaged")
    world.jobs = JobStore(world.store, "job", world.clock, world.ids)

    with pytest.raises(CorruptDataError):
        world.collect()

    assert orphan.object_key in world.stored()


def test_fence_does_not_hide_the_chain() -> None:
    """After a take-over the chain is that behind the fence, and its objects stay (I11)."""
    world = World()
    handle = world.object(0)
    world.complete(handle)
    world.jobs.claim("another")
    world.clock.advance(AGE)

    assert world.collect().orphans == []
    assert world.stored() == {handle.object_key}


def test_command_lists_then_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dstl gc`` lists orphans, and deletes them only when told to."""
    store = open_store(f"file://{tmp_path}")
    world = World(store)
    world.complete(world.object(0))
    orphan = world.object(1)
    command = ["gc", "--storage", f"file://{tmp_path}", "--age-min-s", "0", "job"]

    assert main(command) == 0
    listed = capsys.readouterr().out
    assert orphan.object_key in world.stored()
    assert main([*command, "--delete"]) == 0

    assert orphan.object_key in listed
    assert "1 orphans of" in listed
    assert orphan.object_key not in world.stored()
    assert len(world.stored()) == 1


def test_command_names_missing_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dstl gc`` of a job that does not exist says so and fails."""
    assert main(["gc", "--storage", f"file://{tmp_path}", "nothing"]) == 2
    assert "there is no job 'nothing'" in capsys.readouterr().err
