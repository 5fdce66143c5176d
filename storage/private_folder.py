"""
Folders of this host that no other user can create, change or redirect.

A user who may write to one folder on the path to a file controls the file. So the whole path is checked from the root,
links included: each part must belong to this process's user, to root, or to a trusted user, and no other user may write
to it, except in a sticky folder, whose entries only their owners can replace. New folders have mode 0700 whatever the
umask, and a path that passed the check cannot be replaced afterwards. Blocking I/O.
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
    """Another user could change a folder's content, so it is not used. Choose another folder."""


@dataclass(frozen=True, slots=True)
class Trust:
    """
    The users whom this process trusts on its host, besides its own user and root.

    Args:
        uids: Other users, such as the user of the node's container manager.
        folder: A folder visible only to trusted users, such as a pod's own volume: neither it nor its parents are
            checked. It must be absolute and without links.
    """

    uids: frozenset[int] = frozenset()
    folder: str = ""

    @classmethod
    def parse(cls, users: str, folder: str = "") -> Trust:
        """
        Parse users given as numbers or names, separated by commas.

        Raises:
            InvalidInputError: A user does not exist, or the folder is not an absolute, normal path.
        """
        if folder and (not os.path.isabs(folder) or os.path.normpath(folder) != folder):
            raise InvalidInputError(f"trusted_dir {folder!r} must be an absolute path without '.', '..' and links")
        return cls(frozenset(_uid(user.strip()) for user in users.split(",") if user.strip()), folder)

    def includes(self, uid: int) -> bool:
        """Return whether a user is this process's own, root, or one of `uids`."""
        return uid in (os.geteuid(), 0) or uid in self.uids


OWN = Trust()
"""Only this process's own user, and root."""


def check_folder(path: str | os.PathLike[str], trust: Trust = OWN) -> None:
    """
    Check that only trusted users can change a folder's content; missing parts of the path are allowed.

    Args:
        path: An absolute path.
        trust: The trusted users.

    Raises:
        UntrustedFolderError: Another user can; the message names the part of the path and the remedy.
        OSError: The path cannot be followed.
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
            raise _refused(path, part, "is part of a loop of links", "remove the link")
        target = os.readlink(part)
        place = "/" if os.path.isabs(target) else place
        pending.extend(reversed([name for name in target.split("/") if name not in ("", ".")]))


def make_folder(path: str | os.PathLike[str], trust: Trust = OWN) -> None:
    """
    Make a folder and its missing parents, private to this process's user; it may already exist.

    Raises:
        UntrustedFolderError: As `check_folder`; before anything is made, or, if the path changed meanwhile, after.
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
        OSError: It cannot be made; FileExistsError: something else is there.
    """
    folder = Path(os.path.abspath(path))
    for _ in range(_TRIES_MAX):  # again if another process removes it meanwhile: only empty folders are removed
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if _is_folder(folder):
                return
        except FileNotFoundError:
            make_private(folder.parent)
        else:
            return
    raise FileNotFoundError(errno.ENOENT, "no folder can be made there, or it is removed again and again", str(folder))


def open_lock(path: str | os.PathLike[str], flags: int = os.O_CREAT) -> int:
    """
    Open a lock file, creating it if `flags` say so; links are not followed, and the content stays unchanged.

    Raises:
        OSError: It cannot be opened, is a link, or is not a regular file of this process's user.
    """
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    found = os.fstat(lock)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(lock)
        raise PermissionError(f"{os.fspath(path)} is not a regular file of this user")
    return lock


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
        raise _refused(path, part, f"belongs to {user_name(found.st_uid)}", "add that user to trusted_uids")
    is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & _WRITABLE_BY_OTHERS
    if is_open and (is_last or not found.st_mode & stat.S_ISVTX):
        remedy = "remove that permission (chmod go-w), name it in trusted_dir if only trusted users see it, as in a pod"
        raise _refused(path, part, "is writable by other users", remedy)


def _is_above(place: str, folder: str) -> bool:
    """Return whether `place` is `folder` or one of its parents."""
    return bool(folder) and (folder == place or folder.startswith(place.rstrip("/") + "/"))


def _refused(path: str | os.PathLike[str], place: str, fact: str, remedy: str) -> UntrustedFolderError:
    return UntrustedFolderError(
        f"folder {os.fspath(path)} is not used, because other users could read or replace its content: {place} {fact}; "
        f"{remedy}, or choose another folder"
    )


def user_name(uid: int) -> str:
    """Return a user's name and id for messages."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):  # the latter for a name with the character NUL
        raise InvalidInputError(f"trusted_uids names {user!r}, but this host has no such user") from None
