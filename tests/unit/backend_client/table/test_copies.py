"""A standby's copy of a table: open for moments, and a task's at once when it wants it."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from backend_client.table import slots
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.opening import open_copy
from backend_client.table.state_table import StateTable
from tests.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a table with a copy in it."""
    found = open_copy(tmp_path)
    assert found is not None
    table, _ = found
    table.advance([(b"key", b"value")], "1.0.u")
    table.close()
    return tmp_path


def test_task_waits_for_a_copy_that_is_open(folder: Path) -> None:
    """A task gets the copy's slot, with its content, as soon as the follower closes it; the follower is told."""
    found = open_copy(folder)
    assert found is not None
    copy, is_wanted = found
    got: list[tuple[str | None, str]] = []

    def run_task() -> None:
        with closing(StateTable.open(folder)) as table:
            got.append((table.version, table._folder.name))

    assert not is_wanted()
    task = threading.Thread(target=run_task)
    task.start()
    wait_until(is_wanted)
    copy.close()
    task.join()

    assert got == [("1.0.u", "0")]


def test_follower_that_hangs_costs_a_task_two_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I16: if the copy is never closed, a task goes on with another slot, and those after it do so at once."""
    monkeypatch.setattr(slots, "_FOLLOWER_MS_MAX", 200)
    found = open_copy(folder)
    assert found is not None
    with closing(found[0]):
        began_s = time.monotonic()
        with closing(StateTable.open(folder)) as table:
            assert (table.version, table._folder.name) == (None, "1")
            table.advance([(b"key", b"value")], "1.0.u")
        assert 0.2 <= time.monotonic() - began_s < 2
        monkeypatch.setattr(slots, "_FOLLOWER_MS_MAX", 60_000)
        began_s = time.monotonic()
        with closing(StateTable.open(folder)) as table:
            assert (table.version, table._folder.name) == ("1.0.u", "1")
        assert time.monotonic() - began_s < 30
        os.utime(folder / "1.lock", (time.time() - 120,) * 2)
        monkeypatch.setattr(slots, "_FOLLOWER_MS_MAX", 200)
        began_s = time.monotonic()
        StateTable.open(folder).close()
        assert time.monotonic() - began_s >= 0.2


def test_table_of_a_task_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task's small table is left alone by tasks and followers, whatever a follower wrote into its lock."""
    monkeypatch.setattr(slots, "_FOLLOWER_MS_MAX", 60_000)
    with closing(StateTable.open(folder)) as first:
        assert first._folder.name == "0"
        assert open_copy(folder) is None
        with closing(StateTable.open(folder)) as second:
            assert second._folder.name == "1"


def test_large_table_of_a_task_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that Spark has given up ends soon: the next try of its batch gets its table, instead of restoring it."""
    monkeypatch.setattr(slots, "_TASK_S_MAX", 60.0)
    with closing(StateTable.open(folder)) as first:
        (first._folder / "large.sst").touch()
        os.truncate(first._folder / "large.sst", 6000 << 20)
        threading.Timer(0.5, first.close).start()
        with closing(StateTable.open(folder)) as second:
            assert second._folder.name == "0"
            begun_s = time.monotonic()
            with closing(StateTable.open(folder, patience_s=0.2)) as third:
                assert third._folder.name == "1"
                assert 0.2 <= time.monotonic() - begun_s < 30
            with closing(StateTable.open(folder)) as third:
                assert third._folder.name == "1", "batches go on there"


def test_follower_that_died_leaves_a_free_slot(folder: Path) -> None:
    """The mark of a follower that was killed does not keep tasks, nor the next follower, from the slot."""
    (folder / "0.lock").write_bytes(b"w")
    found = open_copy(folder)
    assert found is not None
    copy, is_wanted = found
    assert not is_wanted()
    copy.close()
    (folder / "0.lock").write_bytes(b"f")

    with closing(StateTable.open(folder)) as table:
        assert table._folder.name == "0"
    assert (folder / "0.lock").read_bytes() == b""


def test_copy_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    """A folder that cannot be made is an error that names it."""
    (tmp_path / "file").touch()

    with pytest.raises(LocalDiskError, match="file/op"):
        open_copy(tmp_path / "file" / "op")
