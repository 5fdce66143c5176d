"""Which folders a service accepts from a client."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.materialization.table_file_check import DamagedFileError
from storage.errors import DstlError, InvalidInputError, UnavailableError
from tests.unit.dstl_service.snapshots import FILES, snapshot_folder


def test_files_are_found_and_read(tmp_path: Path) -> None:
    """All files of a snapshot are read as they are, and a hard link has the identity of its file."""
    path = snapshot_folder(tmp_path / "s")
    folder = SnapshotFolder.open(str(path), None)
    found = folder.files()
    assert {file.name: folder.read(file) for file in found} == FILES
    folder.close()

    other = tmp_path / "other"
    other.mkdir()
    for name in FILES:
        os.link(path / name, other / name)
    assert [file.identity for file in SnapshotFolder.open(str(other), None).files()] == [
        file.identity for file in found
    ]


@pytest.mark.parametrize("kind", ["symlink", "folder", "name", "fifo", "no current"])
def test_folder_with_anything_else_is_refused(tmp_path: Path, kind: str) -> None:
    """I15: a folder with a link, a folder, a pipe or a file of another name is refused, and nothing of it is read."""
    path = snapshot_folder(tmp_path / "s")
    if kind == "symlink":
        (tmp_path / "secret").write_text("secret")
        (path / "000010.sst").symlink_to(tmp_path / "secret")
    elif kind == "folder":
        (path / "000010.sst").mkdir()
    elif kind == "fifo":
        os.mkfifo(path / "000010.sst")
    elif kind == "name":
        (path / "id_rsa").write_text("secret")
    else:
        (path / "CURRENT").unlink()

    with pytest.raises(InvalidInputError, match="cannot be taken"):
        SnapshotFolder.open(str(path), None)


def test_path_must_be_plain(tmp_path: Path) -> None:
    """Relative paths, dots, a missing folder, a file and a link to a folder are refused."""
    path = snapshot_folder(tmp_path / "s")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").write_text("")
    for text in (
        "s",
        f"{path}/../s",
        f"{path}/",
        f"{path}\0",
        f"{tmp_path}/no",
        f"{tmp_path}/link",
        f"{tmp_path}/file",
    ):
        with pytest.raises(InvalidInputError):
            SnapshotFolder.open(text, None)


def test_root_confines_folders(tmp_path: Path) -> None:
    """With a root set, a folder elsewhere is refused, even if a link seems to put it below the root."""
    (tmp_path / "root").mkdir()
    inside = snapshot_folder(tmp_path / "root" / "s")
    (tmp_path / "outside").mkdir()
    outside = snapshot_folder(tmp_path / "outside" / "s")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")

    SnapshotFolder.open(str(inside), tmp_path / "root").close()
    for path in (outside, tmp_path / "root" / "link" / "s"):
        with pytest.raises(InvalidInputError, match="root"):
            SnapshotFolder.open(str(path), tmp_path / "root")


def test_folder_is_locked_while_held(tmp_path: Path) -> None:
    """The removal of abandoned folders sees that this one is in use until it is closed."""
    path = snapshot_folder(tmp_path / "s")
    folder = SnapshotFolder.open(str(path), None)
    other = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder.close()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with pytest.raises(InvalidInputError, match="being removed"):
        SnapshotFolder.open(str(path), None)
    os.close(other)


def test_changed_file_is_unavailable(tmp_path: Path) -> None:
    """A file that was removed or grew since it was listed ends this snapshot, not the service."""
    path = snapshot_folder(tmp_path / "s")
    folder = SnapshotFolder.open(str(path), None)
    first, second, *_ = (file for file in folder.files() if file.name.endswith(".sst"))
    (path / first.name).write_bytes(b"longer" * 100)
    (path / second.name).unlink()
    for file in (first, second):
        with pytest.raises(UnavailableError, match=file.name):
            folder.read(file)
    folder.close()


def test_removed_folder_is_gone(tmp_path: Path) -> None:
    """Removing deletes the files and the folder; doing so twice is harmless."""
    path = snapshot_folder(tmp_path / "s")
    folder = SnapshotFolder.open(str(path), None)
    folder.remove()

    assert not path.exists()
    folder.remove()


@pytest.mark.parametrize("place", ["open", "listdir", "stat"])
@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, DamagedFileError), (errno.EMFILE, UnavailableError)])
def test_folder_that_the_disk_has_lost_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, kind: type[DstlError]
) -> None:
    """I10: an error of the disk is damage wherever the folder is read, as it is where a file is read."""
    path = snapshot_folder(tmp_path / "s")

    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    if place == "open" and code == errno.EMFILE:
        kind = InvalidInputError
    with monkeypatch.context() as patch:
        patch.setattr(os, place, failing)
        with pytest.raises(DstlError, match=os.strerror(code)) as raised:
            SnapshotFolder.open(str(path), None)
    assert type(raised.value) is kind


@pytest.mark.parametrize("swapped", ["parent", "folder"])
def test_path_that_is_redirected_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """I15: replacing a folder on the path by a link after the check opens nothing elsewhere."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    inside = snapshot_folder(root / "a" / "s")
    snapshot_folder(outside / "s")
    real = os.path.realpath

    def realpath(path: str) -> str:
        found = real(path)
        if str(path).startswith(str(inside.parent)):
            target, link = (outside / "s", inside) if swapped == "folder" else (outside, inside.parent)
            link.rename(tmp_path / "moved")
            link.symlink_to(target)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os.path, "realpath", realpath)
        with pytest.raises(InvalidInputError, match="cannot be taken"):
            SnapshotFolder.open(str(inside), root)
    assert (root / "a").is_symlink() or inside.is_symlink()


@pytest.mark.parametrize("has_root", [False, True])
def test_link_to_the_table_of_another_job_is_refused(tmp_path: Path, has_root: bool) -> None:
    """C35: the folders above a snapshot are those of the job's own table, wherever links of their names lead."""
    (tmp_path / "tables" / "bobs" / "op" / "00000-00127").mkdir(parents=True)
    theirs = snapshot_folder(tmp_path / "tables" / "bobs" / "op" / "00000-00127" / "s")
    (tmp_path / "mallory" / "own" / "op").mkdir(parents=True)
    (tmp_path / "mallory" / "own" / "op" / "00000-00127").symlink_to(theirs.parent)
    root = tmp_path / "tables" if has_root else None

    with pytest.raises(InvalidInputError, match="not where the job's own tables are"):
        SnapshotFolder.open(
            str(tmp_path / "mallory" / "own" / "op" / "00000-00127" / "s"), root, ("own", "op", "00000-00127")
        )
    (tmp_path / "local").symlink_to(tmp_path)
    for place in (tmp_path, tmp_path / "local"):
        own = place / theirs.relative_to(tmp_path)
        SnapshotFolder.open(str(own), root, ("bobs", "op", "00000-00127")).close()


def test_links_may_lead_below_the_root(tmp_path: Path) -> None:
    """The root, and the folder above a snapshot, may be links; the snapshot itself may not."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    path = snapshot_folder(tmp_path / "root" / "a" / "s")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    for given, root in ((tmp_path / "link" / "a" / "s", tmp_path / "root"), (path, tmp_path / "link")):
        folder = SnapshotFolder.open(str(given), root)
        assert len(folder.files()) == len(FILES)
        folder.close()
    (tmp_path / "root" / "b").symlink_to(path)
    for refused in (tmp_path / "root" / "b", tmp_path / "root"):
        with pytest.raises(InvalidInputError):
            SnapshotFolder.open(str(refused), tmp_path / "root")
