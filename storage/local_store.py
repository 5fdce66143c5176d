"""
Objects as files below a folder: a local disk, or a mounted distributed file system.

An object is written to a temporary file in `.tmp` of the same base, flushed to the device, and given its name by
`link` (create if absent, atomic on every POSIX file system) or by `rename` (replace). Then the folder that names it is
flushed as well, and every new folder above it, so that an acknowledged object survives a loss of power (I5).

If the folder's disk is unmounted, the folder below the mount point is not this store: nothing is acknowledged, and
nothing counts as absent (I11), until it is mounted again.

Below the base no link is followed, of a folder or a file, also if it comes there meanwhile: whoever writes one, such as
another user of a shared disk, would have this process delete or overwrite files elsewhere, or read them: the token that
only this process's user may read, for example. Nothing but a regular file is read: a pipe would block.

Files that a crash leaves in `.tmp` are never listed and only take space; `remove_leftovers` deletes them.
An empty folder may be removed at any time: a `put` that needs it makes it again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from storage.clock import Clock, IdSource, SystemClock, SystemIds
from storage.errors import DstlError, InvalidInputError, NotFoundError, UnavailableError
from storage.local_files import (
    WAY,
    flush_folder,
    flush_opened,
    folder_within,
    link,
    open_to_read,
    read_at,
    write_file,
)
from storage.model import ObjectInfo
from storage.mounts import check_folder, check_mounted, mount_point_of
from storage.object_store import (
    KEY_CHARS_MAX,
    PROBE_FOLDER,
    ObjectData,
    buffers_of,
    check_range_size,
    check_refused_put,
    check_whole_size,
    probe,
    validate_key,
    validate_prefix,
    validate_range,
)

_Result = TypeVar("_Result")

_TEMPORARY_FOLDER = ".tmp"
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}")  # a unique id; files with other names were not made here
_FOLDER_TRIES = 10

_ADVICE = {
    errno.ENOSPC: "no space is left on the device; free some space or enlarge it",
    errno.EDQUOT: "the disk quota is used up; free some space or raise it",
    errno.EACCES: "permission denied; let the user of this process read and write the folder",
    errno.EPERM: "not permitted; the folder must be writable and its file system must have hard links",
    errno.EOPNOTSUPP: "not supported; the file system must have hard links",
    errno.EROFS: "the file system is mounted read-only; mount it writable",
    errno.EMFILE: "too many files are open in this process; raise its limit",
    errno.ESTALE: "the mount is stale; mount it again",
    errno.ELOOP: "a part of its path is a link, which is not followed; put or mount there what it leads to",
}


class LocalStore:
    """
    A store in a folder. Any number of processes and hosts may use one folder at once.

    Args:
        base: Absolute path; made if it does not exist.
        clock: Determines the age of leftovers.
        ids: Names of temporary files; must be unique over all hosts that share the folder.

    Raises:
        InvalidInputError: The path is not absolute.
        UnavailableError: The folder cannot be made.
    """

    def __init__(
        self, base: str | os.PathLike[str], *, clock: Clock | None = None, ids: IdSource | None = None
    ) -> None:
        path = os.fspath(base)
        if not os.path.isabs(path):
            raise InvalidInputError(f"the folder of a local store must be an absolute path, not {path!r}")
        self._base = os.path.normpath(path)
        self._temporary = os.path.join(self._base, _TEMPORARY_FOLDER)
        self._clock = clock or SystemClock()
        self._ids = ids or SystemIds()
        parent = os.path.dirname(self._base)
        # Folders whose own names are known to be on the device. Only ever grows; a lost race costs one flush.
        self._durable = {parent}
        if os.path.isdir(self._base) and not os.access(parent, os.R_OK):
            # The base is in a folder that this process may not open, and so cannot flush; an administrator made it.
            self._durable.add(self._base)
        with _translated(self._base, "make"):
            os.makedirs(parent, exist_ok=True)
            self._make_folder(self._base)
            self._make_folder(self._temporary)
        self._mount_point = mount_point_of(self._base)

    @property
    def url(self) -> str:
        """The folder as a `file` URL."""
        return Path(self._base).as_uri()

    def put(self, key: str, data: ObjectData, *, if_absent: bool = False) -> None:
        """Write a temporary file, flush it, give it its name, flush the folder."""
        target = self._path(key)
        check_mounted(self._mount_point)
        with _translated(key, "write"):
            self._make_folder(self._temporary)
            self._make_folder(os.path.dirname(target))
            with folder_within(self._base, _TEMPORARY_FOLDER, WAY) as temporaries:
                temporary = self._ids.unique_id()
                try:
                    write_file(temporary, temporaries, buffers_of(data))
                    is_new = self._name(temporary, temporaries, key, if_absent=if_absent)
                finally:
                    with suppress(OSError):
                        os.unlink(temporary, dir_fd=temporaries)
            # Also for an existing object, on which the caller relies: the put that made it may have died before this.
            flush_folder(os.path.dirname(target))
            if not is_new:
                check_refused_put(self, key, data)
        check_mounted(self._mount_point)

    def get(self, key: str) -> bytes:
        """Read a file."""
        return self._read(key, lambda file: read_at(file, 0, check_whole_size(key, os.fstat(file).st_size)))

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Read a part of a file."""
        validate_range(offset, size)
        return check_range_size(key, self._read(key, lambda file: read_at(file, offset, size)), offset, size)

    def head(self, key: str) -> ObjectInfo:
        """Describe a file by opening it: a mounted file system may otherwise report a deleted one from its cache."""
        return self._read(key, lambda file: _describe(key, os.fstat(file)))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Walk the folders in the order of keys; each is read lazily."""
        validate_prefix(prefix)
        folder = prefix[: prefix.rfind("/") + 1]
        return self._walk(folder, prefix, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files and flush their folders, so that a loss of power does not bring them back."""
        changed: dict[str, None] = {}
        for folder, within in groupby(map(validate_key, keys), os.path.dirname):
            with suppress(NotFoundError), _translated(folder, "delete"), folder_within(self._base, folder) as place:
                for key in within:
                    with suppress(NotFoundError), _translated(key, "delete"):
                        os.unlink(os.path.basename(key), dir_fd=place)
                        changed[folder] = None
        for folder in changed:
            with suppress(NotFoundError), _translated(folder, "delete"), folder_within(self._base, folder) as place:
                flush_opened(place)
        check_mounted(self._mount_point)

    def check_writable(self, folder: str = PROBE_FOLDER) -> None:
        """Check how the folder is mounted, and try all operations, hard links among them."""
        check_folder(self._base, _TEMPORARY_FOLDER)
        probe(self, self._ids.unique_id(), folder)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def remove_leftovers(self, age_min_ms: int) -> int:
        """Delete temporary files not modified for `age_min_ms`, left by crashed writers; return how many."""
        newest_ms = self._clock.now_ms() - age_min_ms
        removed = 0
        with _translated(self._temporary, "clean"):
            # By the folder's descriptor: a link in the folder's place could lead to any files.
            folder = os.open(self._temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for name in filter(_TEMPORARY_NAME.fullmatch, os.listdir(folder)):
                    with suppress(FileNotFoundError):
                        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode) and found.st_mtime_ns // 1_000_000 <= newest_ms:
                            os.unlink(name, dir_fd=folder)
                            removed += 1
            finally:
                os.close(folder)
        return removed

    def remove_empty_folders(self, parent: str, age_min_ms: int) -> int:
        """
        Delete empty folders directly below one that were not changed for `age_min_ms`; return how many.

        A put that is about to name a file in one of them makes the folder again.
        """
        newest_ms = self._clock.now_ms() - age_min_ms
        removed = 0
        with suppress(NotFoundError), _translated(parent, "delete"), folder_within(self._base, parent) as place:
            for name in os.listdir(place):
                with suppress(OSError):  # not empty, gone, or no folder
                    if os.stat(name, dir_fd=place, follow_symlinks=False).st_mtime_ns // 1_000_000 <= newest_ms:
                        os.rmdir(name, dir_fd=place)
                        removed += 1
        return removed

    def _name(self, temporary: str, temporaries: int, key: str, *, if_absent: bool) -> bool:
        """Give a file its name, making the folder again if it was just removed; return whether the name was free."""
        folder, name = os.path.split(key)
        for _ in range(_FOLDER_TRIES):
            with suppress(FileNotFoundError), folder_within(self._base, folder, WAY) as place:
                if if_absent:
                    return link(temporary, temporaries, name, place)
                os.rename(temporary, name, src_dir_fd=temporaries, dst_dir_fd=place)
                return True
            self._make_folder(os.path.join(self._base, folder))
        raise UnavailableError(
            f"cannot write {key} in {self._base}: another process keeps removing its folder, or {temporary}"
        )

    def _path(self, key: str) -> str:
        return os.path.join(self._base, validate_key(key))

    def _read(self, key: str, read: Callable[[int], _Result]) -> _Result:
        folder, name = os.path.split(validate_key(key))
        try:
            with _translated(key, "read"), folder_within(self._base, folder, WAY) as place:
                file = open_to_read(name, place)
                try:
                    if not stat.S_ISREG(os.fstat(file).st_mode):
                        raise _not_found(key)
                    return read(file)
                finally:
                    os.close(file)
        except NotFoundError:
            check_mounted(self._mount_point)
            raise

    def _make_folder(self, folder: str) -> None:
        """Make a folder and its parents up to the base, and flush each new name to the device."""
        if folder != self._base and os.path.islink(folder):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), folder)
        if folder in self._durable and os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        if folder != self._base:
            self._make_folder(parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        # An existing folder may just have been made by a process that has not flushed it yet.
        flush_folder(parent)
        self._durable.add(folder)

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield the objects below `folder` ("" or ending in '/'), one folder in memory at a time, by ascending key."""
        for name in self._names(folder):
            key = folder + name
            if not key.startswith(prefix):
                continue
            if name.endswith("/"):
                # What is below a path that is longer than any key is no object, however deep it is.
                if len(key) <= KEY_CHARS_MAX and (key > start_after or start_after.startswith(key)):
                    yield from self._walk(key, prefix, start_after)
            elif key > start_after:
                # Deleted meanwhile, or a foreign file whose name is not a key.
                with suppress(NotFoundError, InvalidInputError):
                    yield self._listed(key)

    def _listed(self, key: str) -> ObjectInfo:
        """Describe a file as a listing does, without opening it; a link is no object."""
        with _translated(key, "read"):
            return _describe(key, os.stat(self._path(key), follow_symlinks=False))

    def _names(self, folder: str) -> Sequence[str]:
        """Return a folder's entries in the order of keys: a folder's name sorts with its '/'."""
        try:
            with folder_within(self._base, folder) as place, os.scandir(place) as found:
                names = sorted(
                    f"{item.name}/" if item.is_dir(follow_symlinks=False) else item.name
                    for item in found
                    if not item.name.startswith(".")
                )
        except (FileNotFoundError, NotADirectoryError):
            names = []
        except OSError as error:
            raise _translate(error, folder or self._base, "list") from error
        check_mounted(self._mount_point)
        return names


def _describe(key: str, info: os.stat_result) -> ObjectInfo:
    if not stat.S_ISREG(info.st_mode):
        raise _not_found(key)
    return ObjectInfo(key, info.st_size, info.st_mtime_ns // 1_000_000)


def _not_found(key: str) -> NotFoundError:
    return NotFoundError(f"object {key} does not exist", key=key)


@contextmanager
def _translated(key: str, verb: str) -> Iterator[None]:
    """Translate errors of the operating system into errors of this project."""
    try:
        yield
    except OSError as error:
        raise _translate(error, key, verb) from error


def _translate(error: OSError, key: str, verb: str) -> DstlError:
    if verb in ("read", "delete") and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return _not_found(key)
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return InvalidInputError(f"cannot {verb} {key}: a folder and an object cannot have the same name", key=key)
    if error.errno == errno.ENAMETOOLONG:
        return InvalidInputError(f"cannot {verb} {key}: the path is too long", key=key)
    advice = _ADVICE.get(error.errno or 0, error.strerror or "unknown error")
    return UnavailableError(f"cannot {verb} {key}: {advice}", key=key, errno=error.errno)
