"""An unusable local folder costs time, never a batch (I16)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend_client.table import memory_table
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.memory_table import MemoryTable
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from storage.errors import CorruptDataError, UnavailableError


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder that replaces the host's memory; it is empty after the test."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory_table, "_MEMORY", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def advance(table: StateTable) -> int:
    """Bring a table to a version, as a restore does."""
    if table.version == "1.0.x":
        return 0
    table.clear()
    return table.advance([(b"key", b"value")], "1.0.x")


def test_table_stays_where_folder_works(tmp_path: Path, memory: Path) -> None:
    """A working folder holds the table, and the next opener finds it there."""
    for expected in (1, 0):
        table, changes = open_advanced(tmp_path / "t", advance)
        assert (type(table), changes, table.get(b"key")) == (StateTable, expected, b"value")
        table.close()


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_unusable_folder_is_replaced(tmp_path: Path, memory: Path, kind: str) -> None:
    """I16: if a folder cannot hold a table, the table is restored into memory, and removed when it is closed."""
    (tmp_path / "t").write_bytes(b"")
    folder = tmp_path / "t" if kind == "a file" else tmp_path / "t" / "below"
    table, changes = open_advanced(folder, advance)

    assert (type(table), changes, table.get(b"key"), table.version) == (MemoryTable, 1, b"value", "1.0.x")
    assert len(list(memory.iterdir())) == 1
    table.close()


@pytest.mark.parametrize("error", [Exception("No space left"), OSError(5, "broken"), LocalDiskError("x")])
def test_folder_that_fails_meanwhile_is_replaced(tmp_path: Path, memory: Path, error: Exception) -> None:
    """I16: if a disk fails while the table advances, the table moves to memory, and the disk's content is discarded."""
    failed: list[StateTable] = []

    def advance_once(table: StateTable) -> int:
        if not failed:
            table.advance([(b"other", b"value")], "0.0.x")
            failed.append(table)
            raise error
        return advance(table)

    table, _ = open_advanced(tmp_path / "t", advance_once)
    assert (type(table), table.get(b"other"), table.get(b"key")) == (MemoryTable, None, b"value")
    table.close()
    later = StateTable.open(tmp_path / "t")
    assert later.version is None
    later.close()


@pytest.mark.parametrize("error", [UnavailableError("sidecar"), CorruptDataError("object"), KeyboardInterrupt()])
def test_other_errors_are_raised(tmp_path: Path, memory: Path, error: BaseException) -> None:
    """An error that is not the local disk's is not retried, and frees the table's slot."""

    def fail(_: StateTable) -> None:
        raise error

    with pytest.raises(type(error)):
        open_advanced(tmp_path / "t", fail)
    table, _ = open_advanced(tmp_path / "t", advance)
    assert type(table) is StateTable
    table.close()


def test_table_of_killed_process_is_removed(tmp_path: Path, memory: Path) -> None:
    """A table that a killed process left in memory is removed with the next spare table; a table in use stays."""
    used = MemoryTable.make()
    (memory / "dstl-table-dead" / "0").mkdir(parents=True)
    (memory / "dstl-table-dead" / "0.lock").touch()
    other = MemoryTable.make()

    assert len(list(memory.iterdir())) == 2
    used.close()
    other.close()


def test_only_own_spare_tables_are_removed(tmp_path: Path, memory: Path) -> None:
    """Any user may write to the memory folder: entries without a table's lock and targets of links stay."""
    victim = tmp_path / "victim"
    for folder in (victim, memory / "dstl-table-notes"):
        folder.mkdir()
        (folder / "diary").write_bytes(b"precious")
    (victim / "0.lock").touch()
    (memory / "dstl-table-link").symlink_to(victim)
    MemoryTable.make().close()

    assert (victim / "diary").exists()
    assert (memory / "dstl-table-notes" / "diary").exists()
    shutil.rmtree(memory / "dstl-table-notes")
    (memory / "dstl-table-link").unlink()


def test_memory_that_cannot_be_used_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no place can hold a table, the error says so."""
    monkeypatch.setattr(memory_table, "_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    (tmp_path / "t").write_bytes(b"")

    with pytest.raises(LocalDiskError, match="no folder in memory can be made"):
        open_advanced(tmp_path / "t", advance)
