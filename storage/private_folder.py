"""
Folders of this host that no other user can have made, can change, or can lead elsewhere.

Whoever may write one folder on the way to a file decides what the file is. So the whole way is looked at, from the root
on, links included: each part belongs to this process's user, to root, or to a user that is trusted by name, and nobody
else may write it, but in a sticky folder, whose entries only their owners can exchange. What is made has mode 0700
whatever the umask, and what was made by such a look cannot be exchanged behind it. Blocking I/O.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from storage.errors import InvalidInputError

_LINKS_MAX = 40
_TRIES_MAX = 100
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFolderError(InvalidInputError):
    """Another user may decide what a folder of this host holds; nothing in it is used. Give another one."""


@dataclass(frozen=True, slots=True)
class Trust:
    """
    Whom this process trusts on its host besides its own user and root.

    Args:
        uids: Other users, such as the one who runs the node's container manager.
        folder: A folder that only trusted users can see, such as a pod's own volume: neither it nor what lies above it
            is looked at. It must be absolute and without links.
    """

    uids: frozenset[int] = frozenset()
    folder: str = ""

    @classmethod
    def parse(cls, users: str, folder: str = "") -> Trust:
        """
        Read users as a person gives them: numbers or names, separated by commas.

        Raises:
            InvalidInputError: There is no such user, or the folder is not absolute.
        """
        if folder and (not os.path.isabs(folder) or os.path.normpath(folder) != folder):
            raise InvalidInputError(f"trusted_dir {folder!r} must be an absolute path without '.', '..' and links")
        return cls(frozenset(_uid(user.strip()) for user in users.split(",") if user.strip()), folder)

    def includes(self, uid: int) -> bool:
        """Say whether a user is this process's own, root, or one of `uids`."""
        return uid in (os.geteuid(), 0) or uid in self.uids


OWN = Trust()
"""Only this process's own user, and root."""


def check_folder(path: str | os.PathLike[str], trust: Trust = OWN) -> None:
    """
    Return if nobody else decides what a folder holds; parts of the way that are not there yet are fine.

    Args:
        path: An absolute path.
        trust: Who may.

    Raises:
        UntrustedFolderError: Somebody else does; the message names the part of the way and what to do.
        OSError: The way cannot be followed.
    """
    pending = list(reversed(os.path.abspath(path).split("/")[1:]))
    place, links = "/", 0
    while pending:
        name = pending.pop()
        if name == "..":
            place = os.path.dirname(place)
            continue
        part = os.path.join(place, name)
        try:
            found = os.lstat(part)
        except FileNotFoundError:
            return
        if not _is_above(part, trust.folder):
            _check_part(path, part, found, trust, is_last=not pending)
        if not stat.S_ISLNK(found.st_mode):
            place = part
            continue
        links += 1
        if links > _LINKS_MAX:
            raise _refused(path, part, "is a link that leads to itself", "remove it")
        target = os.readlink(part)
        place = "/" if os.path.isabs(target) else place
        pending.extend(reversed([name for name in target.split("/") if name not in ("", ".")]))


def make_folder(path: str | os.PathLike[str], trust: Trust = OWN) -> None:
    """
    Make a folder, and those above it, for this process's user alone; it may be there already.

    Raises:
        UntrustedFolderError: As `check_folder`; nothing is made then.
        OSError: It cannot be made.
    """
    check_folder(path, trust)
    make_private(path)
    check_folder(path, trust)


def make_private(path: str | os.PathLike[str]) -> None:
    """
    Make a folder, and those above it that are missing, for this process's user alone, whatever the umask.

    Raises:
        FileNotFoundError: It is removed as often as it is made.
        OSError: It cannot be made; FileExistsError: something is there that is no folder.
    """
    _make(Path(os.path.abspath(path)))


def open_lock(path: str | os.PathLike[str], flags: int = os.O_CREAT) -> int:
    """
    Open a file to lock it, and make it if `flags` say so; a link is not followed, and what the file holds stays.

    Raises:
        OSError: It cannot be opened, is a link, or is no file of this process's user.
    """
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(lock)
        raise PermissionError(f"{os.fspath(path)} is no file of this user")
    return lock


def _make(path: Path) -> None:
    """Make a folder; what others remove meanwhile is made again, for who removes folders removes empty ones."""
    for _ in range(_TRIES_MAX):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if _is_folder(path):
                return
        except FileNotFoundError:
            _make(path.parent)
        else:
            return
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(path))


def _is_folder(path: Path) -> bool:
    """
    Return whether a folder that was there is there yet.

    Raises:
        FileExistsError: Something else is.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return True
    except FileNotFoundError:
        if not os.path.islink(path):
            return False
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _check_part(path: str | os.PathLike[str], part: str, found: os.stat_result, trust: Trust, *, is_last: bool) -> None:
    if not trust.includes(found.st_uid):
        raise _refused(path, part, f"belongs to {user_name(found.st_uid)}", "let trusted_uids name that user")
    is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & _WRITABLE_BY_OTHERS
    if is_open and (is_last or not found.st_mode & stat.S_ISVTX):
        raise _refused(path, part, "can be written by other users", "take that right away (chmod go-w)")


def _is_above(place: str, folder: str) -> bool:
    """Say whether `place` is `folder` or lies above it."""
    return bool(folder) and (folder == place or folder.startswith(place.rstrip("/") + "/"))


def _refused(path: str | os.PathLike[str], place: str, fact: str, remedy: str) -> UntrustedFolderError:
    return UntrustedFolderError(
        f"folder {os.fspath(path)} is not used, for others could read or exchange what it holds: {place} {fact}; "
        f"{remedy}, or name another folder"
    )


def user_name(uid: int) -> str:
    """Return how a person knows a user."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise InvalidInputError(f"trusted_uids names {user!r}, and this host has no such user") from None
