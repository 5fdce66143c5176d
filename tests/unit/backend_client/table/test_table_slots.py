"""Slots of tables: held by one task, found again by the next, and removed when idle."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.table import slots
from backend_client.table.opening import open_advanced
from backend_client.table.slots import IDLE_S, free_slots, remove_idle_slots
from backend_client.table.state_table import StateTable

CHANGES: list[tuple[bytes, bytes | None]] = [(b"key", b"value")]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Return the folder of a host's tables, in which the next search for idle slots is due."""
    folder = tmp_path / "tables"
    folder.mkdir()
    marker = folder / "cleaned"
    marker.touch()
    age(marker, 2 * 3600)
    return folder


def age(path: Path, age_s: float) -> None:
    """Set a file's modification time to some time ago."""
    os.utime(path, (time.time() - age_s,) * 2)


def made(folder: Path, slot: int = 0, age_s: float = 0) -> Path:
    """Make a table in a slot last opened some time ago; return its folder."""
    held = [StateTable.open(folder) for _ in range(slot + 1)]
    held[-1].advance(CHANGES, "1.0.u")
    for table in held:
        table.close()
    age(folder / f"{slot}.lock", age_s)
    return folder / str(slot)


def clean(tables: Path, idle_s: float = IDLE_S) -> None:
    """Remove idle slots, as a task does after opening its table."""
    remove_idle_slots(tables / "job" / "op" / "00000-00001", idle_s)


def test_idle_slots_are_removed(tables: Path) -> None:
    """Tables of deleted jobs, other parallelisms and extra slots are removed with empty folders; slots in use stay."""
    idle = [
        made(tables / "gone" / "op" / "00000-00007", age_s=2 * IDLE_S),
        made(tables / "job" / "op" / "00000-00007", age_s=2 * IDLE_S),
        made(tables / "job" / "op" / "00000-00001", slot=1, age_s=2 * IDLE_S),
    ]
    (idle[0].with_name("0.incoming")).mkdir()
    (idle[0].with_name("0.snapshot-left")).mkdir()
    kept = [made(tables / "job" / "op" / "00000-00001"), made(tables / "job" / "op" / "00002-00003", age_s=IDLE_S / 2)]
    with closing(StateTable.open(tables / "other" / "op" / "00000-00001")) as table:
        age(table._folder.with_name("0.lock"), 2 * IDLE_S)
        clean(tables)
        table.advance(CHANGES, "1.0.u")

    assert not any(path.exists() for path in idle)
    assert all((path / "CURRENT").exists() for path in [*kept, table._folder])
    assert sorted(path.name for path in tables.iterdir()) == ["cleaned", "job", "other"]
    assert sorted(path.name for path in (tables / "job" / "op").iterdir()) == ["00000-00001", "00002-00003"]
    assert not (tables / "job" / "op" / "00000-00001" / "1.lock").exists()


def test_nothing_foreign_is_removed(tables: Path, tmp_path: Path) -> None:
    """In the folder of tables, only entries with a slot's place and name are removed, and no link is followed."""
    victim = made(tmp_path / "victim" / "op" / "00000-00001", age_s=2 * IDLE_S)
    (tables / "link").symlink_to(tmp_path / "victim")
    foreign = tables / "my" / "old" / "photos-2019"
    (foreign / "0").mkdir(parents=True)
    (foreign / "0.lock").touch()
    age(foreign / "0.lock", 2 * IDLE_S)
    clean(tables)

    assert (victim / "CURRENT").exists()
    assert (foreign / "0").exists()


def test_lock_that_is_a_link_is_not_locked(tmp_path: Path) -> None:
    """The target of a link in place of a lock is neither locked nor changed."""
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "0.lock").symlink_to(tmp_path / "target")

    with pytest.raises(OSError, match="symbolic links"):
        next(free_slots(tmp_path / "table"))


def test_folders_of_tables_are_private(tmp_path: Path) -> None:
    """All folders created for a table are private to this user, whatever the umask."""
    before = os.umask(0)
    try:
        _, lock = next(free_slots(tmp_path / "tables" / "job" / "op" / "00000-00001"))
    finally:
        os.umask(before)
    os.close(lock)

    made_folders = [tmp_path / "tables", *(tmp_path / "tables").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made_folders if path.is_dir()} == {0o700}


def test_idle_time_counts_from_the_last_opening(tables: Path) -> None:
    """The idle time counts from a table's last opening, for any purpose."""
    slot = made(tables / "job" / "op" / "00000-00001", age_s=2 * IDLE_S)
    StateTable.open(slot.parent).close()
    clean(tables)

    assert (slot / "CURRENT").exists()


def test_idle_slots_are_looked_for_once_an_hour(tables: Path) -> None:
    """The first task searches, and no other one does within the hour, even while the first still searches."""
    slot = made(tables / "gone" / "op" / "00000-00001", age_s=2 * IDLE_S)
    with open(tables / "cleaned", "rb") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        clean(tables)
        assert slot.exists()
    clean(tables)
    assert not slot.exists()
    slot = made(tables / "gone" / "op" / "00000-00001", age_s=2 * IDLE_S)
    clean(tables)
    assert slot.exists()
    age(tables / "cleaned", 3601)
    clean(tables)
    assert not slot.exists()


def test_much_is_removed_bit_by_bit(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal does not delay a batch for long; the rest is removed a minute later."""
    slot = made(tables / "gone" / "op" / "00000-00001", age_s=2 * IDLE_S)
    monkeypatch.setattr(slots, "_REMOVING_S", -1)
    begun = time.time()
    clean(tables)
    ended = time.time()
    assert slot.exists()
    monkeypatch.undo()
    clean(tables)
    assert slot.exists()

    turn = (tables / "cleaned").stat().st_mtime + 3600
    assert begun + 59 < turn < ended + 61
    age(tables / "cleaned", time.time() - (tables / "cleaned").stat().st_mtime + 60)
    clean(tables)
    assert not slot.exists()


def test_snapshot_in_work_keeps_its_slot(tables: Path) -> None:
    """A slot whose snapshot the sidecar is still storing stays, and is found again later."""
    slot = made(tables / "gone" / "op" / "00000-00001", age_s=2 * IDLE_S)
    snapshot = slot.with_name("0.snapshot-x")
    snapshot.mkdir()
    held = os.open(snapshot, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    clean(tables)
    os.close(held)
    assert (slot.exists(), snapshot.exists()) == (False, True)

    age(tables / "cleaned", 3601)
    clean(tables)
    assert list(tables.iterdir()) == [tables / "cleaned"]


@contextmanager
def at_next_lock(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], Any], times: int = 1) -> Iterator[None]:
    """Call a function between opening and locking each of the next lock files."""
    flock, left = fcntl.flock, [happen] * times

    def late(descriptor: int, operation: int) -> None:
        if left:
            left.pop()()
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        yield
    assert not left


def test_removed_lock_is_created_again(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is about to lock a slot that is removed at that moment gets a lock that all others see."""
    root = tables / "job" / "op" / "00000-00001"
    made(root, age_s=2 * IDLE_S)
    with at_next_lock(monkeypatch, lambda: clean(tables)):
        slot, lock = next(free_slots(root))

    assert (slot, os.fstat(lock).st_ino) == (root / "0", (root / "0.lock").stat().st_ino)
    assert next(free_slots(root))[0] == root / "1"
    os.close(lock)


def test_lock_that_is_removed_many_times_is_locked(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is about to lock a slot gets it, however often a removal comes first."""
    root = tables / "job" / "op" / "00000-00001"

    def remove() -> None:
        (root / "0.lock").unlink()
        for folder in (root, *root.parents[:2]):
            folder.rmdir()

    with at_next_lock(monkeypatch, remove, times=100):
        slot, lock = next(free_slots(root))

    assert (slot, os.fstat(lock).st_ino) == (root / "0", (root / "0.lock").stat().st_ino)
    os.close(lock)


@pytest.mark.parametrize("is_open", [True, False])
def test_slot_opened_just_before_is_kept(tables: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """A slot opened just before its removal stays, even if it was closed again."""
    marker, root = tables / "cleaned", tables / "job" / "op" / "00000-00001"
    slot = made(root, age_s=2 * IDLE_S)
    opened: list[StateTable] = []

    def open_it() -> None:
        opened.append(StateTable.open(root))
        if not is_open:
            opened[0].close()

    remove = slots._remove_if_idle

    def remove_late(path: Path, idle_s: float) -> bool:
        with at_next_lock(monkeypatch, open_it):
            return remove(path, idle_s)

    monkeypatch.setattr(slots, "_remove_if_idle", remove_late)
    clean(tables)

    assert (slot / "CURRENT").exists()
    assert opened[0]._folder == slot
    opened[0].close()
    assert marker.exists()


def test_slots_are_held_by_one_while_they_are_removed(tables: Path) -> None:
    """However openings and removals interleave, a slot has at most one holder, and a held slot stays."""
    root = tables / "job" / "op" / "00000-00001"
    defects: list[str] = []
    is_over = threading.Event()

    def use(name: str) -> None:
        for _ in range(300):
            slot, lock = next(free_slots(root))
            try:
                slot.mkdir(exist_ok=True)
                owner = slot / "owner"
                owner.write_text(name)
                time.sleep(0)
                if owner.read_text() != name:
                    defects.append(f"{slot} had two owners")
                owner.unlink()
            except OSError as error:
                defects.append(f"{slot} was removed: {error}")
            finally:
                os.close(lock)

    def remove() -> None:
        while not is_over.is_set():
            slots._remove_idle(tables, -1)

    users = [threading.Thread(target=use, args=(name,)) for name in ("one", "two", "three")]
    remover = threading.Thread(target=remove)
    for thread in (remover, *users):
        thread.start()
    for thread in users:
        thread.join()
    is_over.set()
    remover.join()

    assert defects == []


def test_task_that_opens_its_table_cleans_up(tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    """I16: idle tables are removed after another one is opened, by that job's idle time, and the log says so."""
    slot = made(tables / "gone" / "op" / "00000-00001", age_s=100)
    caplog.set_level(logging.INFO)
    table, _ = open_advanced(tables / "job" / "op" / "00000-00001", lambda table: table.advance(CHANGES, "1.0.u"), 60)
    table.close()

    assert (slot.exists(), (table._folder / "CURRENT").exists()) == (False, True)
    assert "1 removed" in caplog.text


@pytest.mark.parametrize("folder", ["t", "job/op/00000-00001", "tables/job/op/00000-00001"])
def test_other_folders_are_left_alone(tmp_path: Path, folder: str) -> None:
    """I16: nothing is removed outside a host's folder of tables, and an unreadable folder is not a failure."""
    slot = made(tmp_path / "other" / "job" / "00000-00001", age_s=2 * IDLE_S)
    remove_idle_slots(tmp_path / folder)
    remove_idle_slots(Path("relative"))

    assert slot.exists()
