"""Orphans are found and deleted; what a checkpoint names, or may yet come to name, stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstl_service.cli import main
from dstl_service.garbage_collector import BATCH_AGE_MAX_MS, ORPHAN_AGE_MIN_MS
from dstl_service.job_store import JobStore
from dstl_service.manifest import ManifestKind
from storage.errors import CorruptDataError
from storage.open import open_store
from tests.unit.dstl_service.world import World

AGE = ORPHAN_AGE_MIN_MS


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


def test_object_of_long_batch_stays() -> None:
    """What the running batch may yet name stays, however long the batch takes (I11)."""
    world = World()
    world.complete(world.object(0))
    early = world.object(1)
    world.clock.advance(100 * AGE)

    assert (world.collect().young, world.collect().orphans) == (1, [])

    world.complete(early)
    assert world.collect().orphans == []
    assert early.object_key in world.stored()


def test_object_of_repeated_batch_goes() -> None:
    """What an earlier try at a checkpoint left is an orphan as soon as the checkpoint exists (I12)."""
    world = World()
    world.complete(world.object(0))
    left, taken = world.object(1), world.object(1)
    world.complete(taken)
    world.clock.advance(AGE)

    assert world.collect().orphans == [left.object_key]


def test_object_of_fenced_driver_goes() -> None:
    """What a driver left that a newer one has fenced is an orphan: it can never be named any more (I4, I12)."""
    world = World()
    world.complete(world.object(0))
    left = world.object(1)
    world.jobs.claim("newer")
    world.clock.advance(AGE)

    assert world.collect().orphans == [left.object_key]


def test_object_of_vanished_driver_goes() -> None:
    """A driver that never came back keeps its objects for a week, not for ever (I12)."""
    world = World()
    world.complete(world.object(0))
    left = world.object(1)
    world.clock.advance(BATCH_AGE_MAX_MS + 1)

    assert world.collect().orphans == [left.object_key]


def test_damaged_orphan_goes() -> None:
    """An object that is no segment object can be named by nothing, and goes as well (I12)."""
    world = World()
    world.complete(world.object(0))
    world.store.put("job/segments/host/torn.seg", b"torn")
    world.clock.advance(AGE)

    assert world.collect().orphans == ["job/segments/host/torn.seg"]


def test_leftovers_of_kills_go(tmp_path: Path) -> None:
    """
    Probes and temporary files of killed processes are deleted with the orphans (I12).

    However young orphans may be, these are in no job's folder: younger ones may be of calls of others that still run.
    """
    store = open_store(f"file://{tmp_path}")
    world = World(store)
    world.complete(world.object(0))
    old = [tmp_path / "probe" / ("0" * 32), tmp_path / ".tmp" / ("2" * 32)]
    young = [tmp_path / "probe" / ("1" * 32), tmp_path / ".tmp" / ("3" * 32)]
    for path in (*old, *young):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for path in old:
        os.utime(path, (1, 1))

    assert main(["gc", "--storage", f"file://{tmp_path}", "--age-min-s", "0", "--delete", "job"]) == 0

    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in young)


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
    named, orphan = world.object(0), world.object(0)
    world.complete(named)
    world.clock.advance(AGE)

    assert world.collect(dry_run=True).orphans == [orphan.object_key]
    assert world.stored() == {named.object_key, orphan.object_key}


def test_lost_manifests_delete_nothing() -> None:
    """Where no checkpoint is to be found, objects of any age stay: they may be all that is left (I11)."""
    world = World()
    handle = world.object(0)
    world.complete(handle)
    world.store.delete([info.key for info in world.store.list("job/checkpoints/")])
    world.clock.advance(10 * AGE)

    report = world.collect()

    assert (report.orphans, report.named) == ([], 1)
    assert world.stored() == {handle.object_key}


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
    orphan = world.object(0)
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


def test_young_subsumed_checkpoint_stays_whole() -> None:
    """I11: while a subsumed manifest is too young to go, all that it needs stays; then everything of it goes."""
    world = World()
    objects = [world.object(0) for _ in range(5)]
    world.complete(objects[0], kind=ManifestKind.COMPLETE)
    world.complete(objects[1])
    world.clock.advance(AGE)
    world.complete(objects[2])  # young, and needs the two before it
    world.compact(objects[3], objects[4])

    assert world.collect(checkpoints_max=1).subsumed == 0
    assert world.stored() == {handle.object_key for handle in objects}
    world.clock.advance(AGE)
    assert world.collect(checkpoints_max=1).subsumed == 3
    assert world.stored() == {handle.object_key for handle in objects[3:]}
