"""A table whose files cannot be opened: needed content is never lost, other content is replaced."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from backend_client.table import state_table
from backend_client.table.files import TableFiles
from backend_client.table.journal import CHANGES_MAX
from backend_client.table.local_disk import LocalDiskError, is_damage, is_useless
from backend_client.table.memory_table import MemoryTable
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from backend_client.table.writes import write

OLD = {b"k-%03d" % number: b"old" for number in range(100)}
NOW = {**OLD, b"k-001": b"new"}
NO_SPACE = Exception("IO error: No space left on device: While appending to file: MANIFEST-000005")


def many() -> dict[bytes, bytes | None]:
    """Return more changes than a journal holds."""
    return {number.to_bytes(4, "big"): b"x" for number in range(CHANGES_MAX + 1)}


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table that is open read-only, with its newest change in the journal."""
    for version, changes in (("1.0.u", OLD), ("2.0.u", {b"k-001": b"new"})):
        with closing(StateTable.open(tmp_path)) as made:
            made.advance(changes.items(), version)
    with closing(StateTable.open(tmp_path)) as made:
        assert not made._is_writable
        yield made


def refuse(monkeypatch: pytest.MonkeyPatch, refusals: int = 1) -> None:
    """Make opening files for writing fail a number of times."""
    open_existing, left = TableFiles.open_existing, [NO_SPACE] * refusals

    def refused(self: TableFiles) -> Any:
        if left:
            raise left.pop()
        return open_existing(self)

    monkeypatch.setattr(TableFiles, "open_existing", refused)


def advance(table: StateTable) -> None:
    table.advance(many().items(), "3.0.u")


def snapshot(table: StateTable) -> None:
    with table.making_snapshot():
        pass


@pytest.mark.parametrize("write", [advance, snapshot])
def test_table_that_cannot_be_written_keeps_its_content(
    tmp_path: Path, table: StateTable, monkeypatch: pytest.MonkeyPatch, write: Callable[[StateTable], None]
) -> None:
    """I1, I16: a needed table that cannot be opened for writing is never emptied; it raises an error and stays."""
    refuse(monkeypatch)
    with pytest.raises(LocalDiskError, match="No space left"):
        write(table)

    assert (table.version, dict(table.items()), table.get(b"k-001")) == ("2.0.u", NOW, b"new")
    write(table)
    assert (table.get(b"k-001"), table.get(b"k-002")) == (b"new", b"old")
    table.close()
    with closing(StateTable.open(tmp_path)) as again:
        assert set(NOW.items()) <= set(again.items())
        assert again.version == ("3.0.u" if write is advance else "2.0.u")


def test_spare_table_replaces_a_table_that_cannot_be_written(
    tmp_path: Path, table: StateTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14, I16: if a table cannot be written, its whole state is restored into memory."""
    table.close()
    refuse(monkeypatch)

    def restore(table: StateTable) -> None:
        if table.version is None:
            table.advance(NOW.items(), "2.0.u")
        advance(table)

    spare, _ = open_advanced(tmp_path, restore)
    with closing(spare):
        assert type(spare) is MemoryTable
        assert (spare.version, dict(spare.items())) == ("3.0.u", {**NOW, **many()})


@pytest.mark.parametrize("other", [None, "1.5.u"])
def test_journal_is_not_written_over_another_table(tmp_path: Path, table: StateTable, other: str | None) -> None:
    """I1: if the files have changed since they were read, the journal's changes get no version on top of them."""
    shutil.rmtree(tmp_path / "0")
    if other is not None:
        with closing(StateTable.open(tmp_path / "other")) as made:
            made.advance([(b"k", b"other")], other)
        shutil.copytree(tmp_path / "other" / "0", tmp_path / "0")
    with pytest.raises(LocalDiskError):
        advance(table)
    assert (table.version, dict(table.items())) == ("2.0.u", NOW)
    table.close()

    with closing(StateTable.open(tmp_path)) as again:
        assert (again.version, dict(again.items())) == (other, {b"k": b"other"} if other else {})


def test_journal_that_cannot_be_written_stays_in_force(
    table: StateTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13, I16: a write that fails after the opening costs the snapshot; the table remains readable."""

    def fail(*_: Any) -> int:
        raise NO_SPACE

    monkeypatch.setattr(state_table, "write", fail)
    with pytest.raises(LocalDiskError, match="no snapshot"):
        snapshot(table)
    assert (table.version, dict(table.items()), table.get(b"k-001")) == ("2.0.u", NOW, b"new")

    monkeypatch.setattr(state_table, "write", write)
    snapshot(table)
    assert (table.version, dict(table.items()), len(table._journal)) == ("2.0.u", NOW, 0)


def test_files_held_by_an_iterator_are_left_alone(tmp_path: Path) -> None:
    """I16: an iterator over a closed table keeps its files; another slot is used until it ends."""
    table = StateTable.open(tmp_path)
    table.advance(many().items(), "1.0.u")
    still = table.items()
    next(still)
    table.close()
    with closing(StateTable.open(tmp_path)) as other:
        assert (other._folder.name, other.version) == ("1", None)
    del still

    with closing(StateTable.open(tmp_path)) as again:
        assert (again._folder.name, again.version, dict(again.items())) == ("0", "1.0.u", many())


@pytest.mark.parametrize(
    ("text", "damage"),
    [
        ("Corruption: CURRENT file does not end with newline", True),
        ("Corruption: Sst file size mismatch: 000008.sst. Expected 114415, actual size 70", True),
        ("Corruption: Corruption: IO error: No such file or directory: While open a file for random read", True),
        ("Invalid argument: CURRENT: does not exist (create_if_missing is false)", True),
        ("Corruption: IO error: While open a file for random read: 000008.sst: Too many open files", False),
        ("IO error: No space left on device: While appending to file", False),
        ("IO error: While fsync: Input/output error", False),
        ("File exists (os error 17)", False),
    ],
)
def test_damage_is_distinguished_from_disk_errors(text: str, damage: bool) -> None:
    """I10, I16: only wrong content is damage; an operation that the disk refuses may work elsewhere."""
    assert is_damage(Exception(text)) == is_useless(Exception(text)) == damage


def test_table_whose_disk_has_lost_bytes_is_useless() -> None:
    """I16: unreadable files are discarded like damaged ones, and do not mean that a stored object is damaged."""
    lost = Exception("IO error: While pread offset 0 len 70: /t/000008.sst: Input/output error")

    assert is_useless(lost)
    assert not is_damage(lost)
    assert not is_useless(OSError(5, "of a user's own file, while pread IO error: Input/output error"))
