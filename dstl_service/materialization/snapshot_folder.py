"""
A snapshot as a task hands it over: a folder on this host with hard links to a table's files.

The client sends a path, so it is used only if it leads to a real folder of this process's own user that holds nothing
but regular files with the names of a table's files. Checks apply to opened files, never to a path that is opened later;
below a root, each folder is opened in the one above it, without following links. Files open below the checked one.
While a folder is held it is locked (shared), which tells the owner of the table that it is still needed; the lock ends
with the process. Blocking I/O.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstl_service.formats.materialization_index import is_table_file
from dstl_service.materialization.table_file_check import DamagedFileError
from storage.errors import CorruptDataError, InvalidInputError, UnavailableError
from storage.lost_bytes import is_lost

_FILES_MAX = 100_000
_DISK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = _DISK | os.O_DIRECTORY
_WAY = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
_TOP = Path("/")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file of a snapshot; `identity` changes whenever its content may have."""

    name: str
    size_bytes: int
    identity: tuple[int, ...]


class SnapshotFolder:
    """A checked, locked folder. Close it or remove it."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: str, root: Path | None, above: tuple[str, ...] | None = None) -> SnapshotFolder:
        """
        Take over a folder.

        Args:
            path: The path that the client sent.
            root: If given, the folder must lie below this one.
            above: If given, the names that the folders above it must have, wherever links on the path lead.

        Raises:
            InvalidInputError: The folder is not acceptable; says why.
            DamagedFileError: The local disk has lost it.
            UnavailableError: It cannot be read for another reason.
        """
        if not os.path.isabs(path) or os.path.normpath(path) != path or "\0" in path:
            raise _refused(path, "it must be an absolute path without '.', '..' or '//'")
        try:
            fd = os.open(path, _FOLDER) if root is None and above is None else _open_below(root or _TOP, path, above)
        except OSError as error:
            if is_lost(error):
                raise _unreadable(path, error) from error
            raise _refused(path, f"{error.strerror}; the service must run on the task's host") from error
        folder = cls(path, fd)
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise _refused(path, "it belongs to another user")
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            folder.files()
        except BlockingIOError as error:
            folder.close()
            raise _refused(path, "it is being removed") from error
        except BaseException:
            folder.close()
            raise
        return folder

    def files(self) -> list[FoundFile]:
        """
        Return the files in the folder.

        Raises:
            InvalidInputError: The folder holds an entry that no snapshot has, or is not a snapshot.
            DamagedFileError: The local disk has lost the folder or a file.
            UnavailableError: It cannot be read for another reason.
        """
        try:
            names = sorted(os.listdir(self._fd))
            infos = [os.stat(name, dir_fd=self._fd, follow_symlinks=False) for name in names[:_FILES_MAX]]
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if len(names) > _FILES_MAX or "CURRENT" not in names:
            raise _refused(self.path, "it is not a snapshot of a table")
        found = []
        for name, info in zip(names, infos, strict=True):
            if not is_table_file(name) or not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                raise _refused(self.path, f"it holds {name[:100]!r}, which no snapshot has")
            found.append(FoundFile(name, info.st_size, (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)))
        return found

    def read(self, file: FoundFile) -> bytes:
        """
        Return a file's bytes.

        Raises:
            DamagedFileError: The local disk has lost the file's bytes.
            UnavailableError: The file is gone or has changed, or cannot be read for another reason.
        """
        try:
            fd = os.open(file.name, _DISK, dir_fd=self._fd)
            with os.fdopen(fd, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise _unreadable(f"{self.path}, file {file.name}", error) from error
        if len(data) != file.size_bytes:
            raise UnavailableError(f"file {file.name} of snapshot {self.path} has changed")
        return data

    def remove(self) -> None:
        """Delete the files and the folder, as far as possible, and close it."""
        with suppress(OSError):  # the next open of the table removes the rest
            for name in os.listdir(self._fd):
                os.unlink(name, dir_fd=self._fd)
            os.rmdir(self.path)
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_below(root: Path, path: str, above: tuple[str, ...] | None) -> int:
    """
    Open a folder below a root; links may lead to the folder's parent, as long as that is below the root.

    If `above` is given, the folders above the folder itself must have these names: another user of the host may have
    made a link of such a name that leads to the table of another job.

    A path that is redirected meanwhile is an error: below the root no link is followed, and each name is looked up
    in the folder that was opened before.
    """
    parent, name = os.path.split(path)
    top, place = os.path.realpath(root), os.path.join(os.path.realpath(parent), name)
    if place == top or not Path(place).is_relative_to(top):
        raise _refused(path, "it is not below the root that this service is configured with (materialization root)")
    if above is not None and Path(place).parent.parts[-len(above) :] != above:
        raise _refused(path, "it is not where the job's own tables are")
    fd = os.open(top, _WAY)
    for part in Path(place).relative_to(top).parts[:-1]:
        fd = _open_next(fd, part, _WAY)
    return _open_next(fd, name, _FOLDER)


def _open_next(above: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=above)
    finally:
        os.close(above)


def _unreadable(what: str, error: OSError) -> CorruptDataError | UnavailableError:
    kind = DamagedFileError if is_lost(error) else UnavailableError
    return kind(f"snapshot {what[:300]} cannot be read: {error}")


def _refused(path: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"snapshot folder {path[:300]!r} cannot be taken: {why}")
