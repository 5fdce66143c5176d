"""Which folders are used: those that no other user can have made, can change or can redirect."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import InvalidInputError
from storage.private_folder import Trust, UntrustedFolderError, check_folder, make_folder, make_private, open_lock

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="only root can let a folder belong to another user")


def stranger(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make the content of `path` belong to another user, as far as this process can tell."""
    if IS_ROOT:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        return
    real = os.lstat

    def lstat(asked: str) -> os.stat_result:
        found = real(asked)
        return os.stat_result((*found[:4], NOBODY, *found[5:])) if asked == str(path) else found

    monkeypatch.setattr(os, "lstat", lstat)


def test_own_folder_is_used(tmp_path: Path) -> None:
    """A folder that only this user can write is used, whether or not it exists yet."""
    check_folder(tmp_path)
    check_folder(tmp_path / "not" / "there")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_folder_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    """A folder that others can write is refused, and so is one below it."""
    (tmp_path / "open" / "own").mkdir(parents=True)
    (tmp_path / "open").chmod(mode)

    for path in (tmp_path / "open", tmp_path / "open" / "own"):
        with pytest.raises(UntrustedFolderError, match=r"open is writable by other users.*chmod go-w"):
            check_folder(path)


def test_sticky_folder_is_passed_and_not_used(tmp_path: Path) -> None:
    """Below a sticky folder like /tmp, own folders are safe; the sticky folder itself is not."""
    (tmp_path / "own").mkdir()
    tmp_path.chmod(0o1777)

    check_folder(tmp_path / "own")
    with pytest.raises(UntrustedFolderError):
        check_folder(tmp_path)


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who made the folder, or one above it, first does not get its files."""
    (tmp_path / "theirs" / "below").mkdir(parents=True)
    stranger(monkeypatch, tmp_path / "theirs")

    for path in (tmp_path / "theirs", tmp_path / "theirs" / "below"):
        with pytest.raises(UntrustedFolderError, match=rf"uid {NOBODY}.*trusted_uids"):
            make_folder(path)


def test_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that another user planted is not followed, even to one's own folder."""
    (tmp_path / "own").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "own")
    stranger(monkeypatch, tmp_path / "link")

    with pytest.raises(UntrustedFolderError, match=rf"link belongs to .*uid {NOBODY}"):
        check_folder(tmp_path / "link")


def test_own_link_is_followed_and_its_target_looked_at(tmp_path: Path) -> None:
    """For one's own link, the target and the whole way to it are checked."""
    (tmp_path / "own").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "good").symlink_to("./open/../own")
    (tmp_path / "bad").symlink_to(tmp_path / "open")
    (tmp_path / "round").symlink_to("round")

    with pytest.raises(UntrustedFolderError, match="open is writable"):
        check_folder(tmp_path / "good")  # through a folder in which "own" could be replaced
    (tmp_path / "good").unlink()
    (tmp_path / "good").symlink_to("own")
    check_folder(tmp_path / "good" / "below")
    with pytest.raises(UntrustedFolderError, match="open is writable"):
        check_folder(tmp_path / "bad" / "below")
    with pytest.raises(UntrustedFolderError, match="loop of links"):
        check_folder(tmp_path / "round")


def test_trusted_users_and_folders_are_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted folders are used: those of a named user, and those below a named folder of one's own."""
    (tmp_path / "theirs" / "below").mkdir(parents=True)
    stranger(monkeypatch, tmp_path / "theirs")

    check_folder(tmp_path / "theirs" / "below", Trust.parse(f" {NOBODY},root"))
    check_folder(tmp_path / "theirs" / "below", Trust.parse("", str(tmp_path / "theirs")))
    with pytest.raises(UntrustedFolderError):
        check_folder(tmp_path / "theirs" / "below", Trust.parse("", str(tmp_path / "their")))


@pytest.mark.parametrize(
    ("users", "folder"), [("no such user", ""), ("", "relative"), ("", "/a/../b"), ("-1", ""), ("a\0b", "")]
)
def test_impossible_trust_is_refused(users: str, folder: str) -> None:
    """A user that does not exist, and a folder path that could lead elsewhere, are errors."""
    with pytest.raises(InvalidInputError, match="trusted_"):
        Trust.parse(users, folder)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_made_folders_are_private_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    """All folders created on the way are private to this user."""
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a" / "b" / "c")
        make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)

    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def after_mkdir(monkeypatch: pytest.MonkeyPatch, path: Path, times: int, happen: Callable[[], None]) -> None:
    """Call a function after each of the next attempts to create a folder, before the creator continues."""
    mkdir, left = os.mkdir, [happen] * times

    def late(made: str | Path, mode: int = 0o777) -> None:
        try:
            mkdir(made, mode)
        finally:
            if left and Path(made) == path:
                left.pop()()

    monkeypatch.setattr(os, "mkdir", late)


@pytest.mark.parametrize("times", [1, 20])
def test_folder_that_is_removed_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A folder that is removed before its check is created again; so is one whose parent is removed."""
    folder = tmp_path / "a"
    folder.mkdir()
    with monkeypatch.context() as patch:
        after_mkdir(patch, folder, 1, folder.rmdir)
        make_private(folder)
    assert folder.is_dir()

    with monkeypatch.context() as patch:
        folder.rmdir()
        after_mkdir(patch, folder, times, folder.rmdir)
        make_private(folder / "b")
    assert (folder / "b").is_dir()


def test_file_in_place_of_a_folder_is_an_error_at_once(tmp_path: Path) -> None:
    """A file in place of a folder, or a dangling link, is an error at once."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")

    for name in ("file", "link"):
        with pytest.raises(FileExistsError, match=name):
            make_private(tmp_path / name)


def test_lock_is_made_private_and_kept_as_it_is(tmp_path: Path) -> None:
    """One's own lock file is opened, and its content stays."""
    path = tmp_path / "lock"
    os.close(open_lock(path))
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("precious", encoding="utf-8")
    os.close(open_lock(path))

    assert path.read_text(encoding="utf-8") == "precious"


def test_lock_follows_no_link_and_does_not_wait(tmp_path: Path) -> None:
    """Neither the target of a link nor a pipe is opened in place of a lock."""
    (tmp_path / "target").write_text("precious", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"symbolic links|not a regular file of this user"):
            open_lock(tmp_path / name)

    assert (tmp_path / "target").read_text(encoding="utf-8") == "precious"


@as_root
def test_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    """A lock file of another user is refused, because that user controls it."""
    (tmp_path / "lock").touch()
    os.chown(tmp_path / "lock", NOBODY, NOBODY)

    with pytest.raises(PermissionError):
        open_lock(tmp_path / "lock")
