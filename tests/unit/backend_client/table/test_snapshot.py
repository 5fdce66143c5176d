"""Snapshots of real tables: created, divided as by a service, and reassembled."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend_client.table.files import TableFiles
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.snapshot import VERSION_KEY, FileNotHereError, IncomingSnapshot
from backend_client.table.state_table import StateTable
from dstl_service.wire import FileFrame
from storage.checksum import checksum128
from storage.errors import CorruptDataError, UnavailableError

VERSION = "3.0.u"
CONTENT = {bytes([0, group, number]): b"v%d" % number for group in range(20) for number in range(200)}
Piece = tuple[FileFrame, bytes]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return a table with content at a version."""
    made = StateTable.open(tmp_path / "table")
    made.advance(CONTENT.items(), VERSION)
    yield made
    made.close()


def pieces_of(folder: Path, size: int = 1000) -> list[Piece]:
    """Return a folder's files as the service streams them."""
    pieces = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        source, checksum = f"{path.name}.object", checksum128(data)
        pieces += [
            (FileFrame(path.name, source, offset, len(data), checksum), data[offset : offset + size])
            for offset in range(0, max(1, len(data)), size)
        ]
    return pieces


def snapshot_of(table: StateTable) -> list[Piece]:
    """Create a snapshot and return its files in pieces."""
    with table.making_snapshot() as folder:
        return pieces_of(folder)


def received(folder: Path, pieces: list[Piece], version: str = VERSION) -> IncomingSnapshot:
    """Receive all pieces."""
    incoming = IncomingSnapshot(folder, "the.index", version)
    for piece, payload in pieces:
        incoming.take(piece, payload)
    return incoming


def test_snapshot_has_only_the_needed_files(table: StateTable) -> None:
    """A snapshot is the table's data as hard links, its MANIFEST and CURRENT; the table remains usable."""
    with table.making_snapshot() as folder:
        names = sorted(path.name for path in folder.iterdir())
        assert all(name.endswith(".sst") or name.startswith("MANIFEST-") or name == "CURRENT" for name in names)
        assert all(path.stat().st_nlink == 2 for path in folder.glob("*.sst"))
        table.advance([(b"\0\0new", b"x")], "4.0.u")

    assert table.version == "4.0.u"


def test_snapshot_is_the_table_at_its_version(table: StateTable, tmp_path: Path) -> None:
    """A reassembled snapshot has the table's content at the time of the snapshot, and nothing newer."""
    pieces = snapshot_of(table)
    table.advance([(b"\0\0new", b"x"), (b"\0\x01\x05", None)], "4.0.u")
    incoming = received(tmp_path / "incoming", pieces)

    assert {key: value for key, value in incoming.items(b"") if key < b"\xff"} == CONTENT
    assert next(iter(incoming.items(b"\0\x05"))) == (b"\0\x05\0", b"v0")


def test_adopted_snapshot_is_the_table(table: StateTable, tmp_path: Path) -> None:
    """A table that adopts a snapshot has its version and content, and advances from there."""
    pieces = snapshot_of(table)
    other = StateTable.open(tmp_path / "other")
    other.advance([(b"\0\0old", b"x")], "1.0.u")
    with other.receiving("the.index", VERSION) as incoming:
        for piece, payload in pieces:
            incoming.take(piece, payload)
        other.adopt(incoming)
    assert (other.version, dict(other.items())) == (VERSION, CONTENT)
    other.advance([(b"\0\0new", b"x")], "4.0.u")
    other.close()

    again = StateTable.open(tmp_path / "other")
    assert (again.version, again.get(b"\0\0new")) == ("4.0.u", b"x")
    again.close()


def lent(folder: Path, downloads: Path) -> list[Piece]:
    """Return a folder's files as the service names those among its downloads, which they become."""
    part = downloads / f"part-{'0' * 32}"
    part.mkdir(parents=True)
    pieces = []
    for number, (piece, _) in enumerate(pieces_of(folder, 1 << 30)):
        (folder / piece.name).rename(part / str(number))
        pieces.append((replace(piece, path=str(part / str(number))), b""))
    return pieces


def test_files_on_this_disk_are_taken(table: StateTable, tmp_path: Path) -> None:
    """Files that the sidecar lends on this disk are moved, not copied."""
    with table.making_snapshot() as folder:
        inodes = {path.name: path.stat().st_ino for path in folder.iterdir()}
        incoming = received(tmp_path / "incoming", lent(folder, tmp_path / "downloads"))

    assert {path.name: path.stat().st_ino for path in incoming.folder.iterdir()} == inodes
    assert not [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]
    assert {key: value for key, value in incoming.items(b"") if key < b"\xff"} == CONTENT


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "link", "linked folder", "other user", "no path"])
def test_file_on_this_disk_that_is_not_as_stored_is_not_taken(
    table: StateTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """I10, I16: a file on this disk that is damaged, gone, or not this user's must come as bytes."""
    with table.making_snapshot() as folder:
        (piece, _) = next(item for item in lent(folder, tmp_path / "downloads") if item[0].name.endswith(".sst"))
    path, data = Path(piece.path), Path(piece.path).read_bytes()
    if damage in ("flipped", "cut"):
        path.write_bytes(data[:-1] + (bytes([data[-1] ^ 1]) if damage == "flipped" else b""))
    elif damage == "gone":
        path.unlink()
    elif damage == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "linked folder":
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
    elif damage == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        piece = replace(piece, path=f"\0{piece.path}")
    incoming = IncomingSnapshot(tmp_path / "incoming", "the.index", VERSION)
    with pytest.raises(FileNotHereError):
        incoming.take(piece, b"")
    incoming.close()


def test_only_downloads_are_taken(table: StateTable, tmp_path: Path) -> None:
    """A service cannot have a task move or remove other files of its user."""
    with table.making_snapshot() as folder:
        (piece, _) = next(item for item in lent(folder, tmp_path / "downloads") if item[0].name.endswith(".sst"))
    for path in (tmp_path / "downloads" / "1", tmp_path / f"part-{'0' * 32}" / "diary"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(Path(piece.path).read_bytes())
        incoming = IncomingSnapshot(tmp_path / "incoming", "the.index", VERSION)
        with pytest.raises(FileNotHereError):
            incoming.take(replace(piece, path=str(path)), b"")
        incoming.close()
        assert path.exists()


def test_file_on_another_disk_is_not_kept_for_it(
    table: StateTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I16: a file that cannot be moved to the table's disk must come as bytes, and its name is removed at once."""
    with table.making_snapshot() as folder:
        (piece, _) = next(iter(lent(folder, tmp_path / "downloads")))
    incoming = IncomingSnapshot(tmp_path / "incoming", "the.index", VERSION)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(FileNotHereError):
        incoming.take(piece, b"")
    incoming.close()
    assert not Path(piece.path).exists()


def test_table_that_was_only_copied_to_has_no_version(table: StateTable, tmp_path: Path) -> None:
    """I1: a process that dies between the entries of a snapshot and the log after it leaves no table to go on from."""
    incoming = received(tmp_path / "incoming", snapshot_of(table))
    other = StateTable.open(tmp_path / "other")
    other.copy(entry for entry in incoming.items(b"\0\x0a") if entry[0] < VERSION_KEY)
    assert other.version is None
    other.close()


def test_snapshot_of_another_version_is_refused(table: StateTable, tmp_path: Path) -> None:
    """I10: a snapshot of another checkpoint than its index says is damaged; no table adopts it."""
    pieces = snapshot_of(table)
    with pytest.raises(CorruptDataError, match=r"the\.index"):
        list(received(tmp_path / "incoming", pieces, "5.0.u").items(b""))

    other = StateTable.open(tmp_path / "other")
    with other.receiving("the.index", "5.0.u") as incoming:
        for piece, payload in pieces:
            incoming.take(piece, payload)
        with pytest.raises(CorruptDataError, match=r"the\.index"):
            other.adopt(incoming)
    assert (other.version, dict(other.items())) == (None, {})
    other.close()


def test_snapshot_without_a_file_is_refused(table: StateTable, tmp_path: Path) -> None:
    """I10: a snapshot that RocksDB cannot open is an error, not an empty table."""
    pieces = [piece for piece in snapshot_of(table) if piece[0].name != "CURRENT"]
    with pytest.raises(CorruptDataError, match=r"the\.index"):
        list(received(tmp_path / "incoming", pieces).items(b""))


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "name", "order", "twice", "between"])
def test_damaged_piece_is_refused(table: StateTable, tmp_path: Path, damage: str) -> None:
    """I10: for wrong bytes, lengths, names or order, the error names the object."""
    pieces = [piece for piece in snapshot_of(table) if piece[0].name.endswith(".sst")]
    assert len(pieces) > 3
    last_piece, last = pieces[-1]
    if damage == "flipped":
        pieces[1] = pieces[1][0], b"?" + pieces[1][1][1:]
    elif damage == "short":
        pieces[-1] = replace(last_piece, size_bytes=last_piece.size_bytes - 1), last[:-1]
        pieces[0] = replace(pieces[0][0], size_bytes=pieces[0][0].size_bytes - 1), pieces[0][1]
    elif damage == "long":
        pieces[-1] = last_piece, last + b"?"
    elif damage == "name":
        pieces[0] = replace(pieces[0][0], name="../000001.sst"), pieces[0][1]
    elif damage == "order":
        pieces[1], pieces[2] = pieces[2], pieces[1]
    elif damage == "twice":
        pieces.insert(1, pieces[0])
    else:
        del pieces[1]

    with pytest.raises(CorruptDataError, match=r"\.sst\.object"):
        received(tmp_path / "incoming", pieces)


def test_full_disk_is_named(table: StateTable, tmp_path: Path) -> None:
    """I16: if nothing can be written, the error says so; it is not one of damage."""
    pieces = snapshot_of(table)
    with pytest.raises(LocalDiskError, match="disk"):
        received(tmp_path / "not there" / "incoming", pieces)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Exception("IO error: No space left on device: While appending to file"), LocalDiskError),
        (Exception("Corruption: IO error: While open a file for random read: Too many open files"), LocalDiskError),
        (OSError(30, "Read-only file system"), LocalDiskError),
        (Exception("Corruption: Sst file size mismatch"), CorruptDataError),
    ],
)
def test_verified_files_are_blamed_for_damage_only(
    table: StateTable, tmp_path: Path, monkeypatch: Any, failure: Exception, kind: type[Exception]
) -> None:
    """I10, I16: a table fails to adopt a snapshot because of damage or of the local disk; it is empty then."""
    pieces = snapshot_of(table)

    def fail(_: TableFiles) -> Any:
        raise failure

    monkeypatch.setattr(TableFiles, "open_existing", fail)
    other = StateTable.open(tmp_path / "other")
    other.advance([(b"\0\0old", b"x")], "1.0.u")
    with other.receiving("the.index", VERSION) as incoming:
        for piece, payload in pieces:
            incoming.take(piece, payload)
        with pytest.raises(kind, match=r"the\.index"):
            other.adopt(incoming)
    assert (other.version, dict(other.items()), other.get(b"\0\0old")) == (None, {}, None)
    other.close()


def test_snapshot_that_was_not_handed_over_is_removed(table: StateTable, tmp_path: Path) -> None:
    """If handing over a snapshot fails, nothing is left beside the table."""
    with pytest.raises(UnavailableError), table.making_snapshot():
        raise UnavailableError("no sidecar")

    assert not list((tmp_path / "table").glob("*.snapshot-*"))


def test_left_behind_snapshots_go_when_the_table_is_opened(tmp_path: Path) -> None:
    """I16: the next opener of a table removes what a crash left; a snapshot in use stays."""
    table = StateTable.open(tmp_path / "table")
    with table.making_snapshot() as left, table.making_snapshot() as held:
        pass
    table.close()
    (tmp_path / "table" / "0.incoming").mkdir()
    (tmp_path / "table" / "0.incoming" / "000001.sst").write_bytes(b"part")
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    StateTable.open(tmp_path / "table").close()
    assert (left.exists(), held.exists(), (tmp_path / "table" / "0.incoming").exists()) == (False, True, False)

    os.close(lock)
    StateTable.open(tmp_path / "table").close()
    assert not held.exists()


def test_snapshot_of_other_slot_is_left_alone(table: StateTable, tmp_path: Path) -> None:
    """An attempt's table in another slot does not touch this one's snapshot."""
    with table.making_snapshot() as folder:
        pass
    StateTable.open(tmp_path / "table").close()

    assert folder.exists()


def test_snapshot_that_cannot_be_made_is_unavailable(table: StateTable, tmp_path: Path, monkeypatch: Any) -> None:
    """I16: if no snapshot can be created, the error is one that the caller expects, and the table still works."""
    (tmp_path / "table" / "0.snapshot-x").write_text("in the way")
    monkeypatch.setattr("uuid.uuid4", lambda: type("Fixed", (), {"hex": "x"}))
    with pytest.raises(UnavailableError, match="no snapshot"), table.making_snapshot():
        pass

    assert table.get(b"\0\0\0") == b"v0"
