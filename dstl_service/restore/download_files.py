"""
The files of the download cache, and the folder of the process that keeps them. Blocking I/O.

    <folder>/dstl-downloads-<uid>/      owned by this user alone; links in it are not followed
      part-<id>.lock                    locked while its process lives
      part-<id>/                        the files of one process, useless to another

Only parts of dead processes are removed: a part is identified by its name and its lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dstl_service.formats.materialization_index import decode_index, matches_key
from storage.checksum import checksum64
from storage.errors import CorruptDataError
from storage.private_folder import Trust, UntrustedFolderError, make_folder, open_lock
from storage.segment_format import decode_object

_BLOCK_BYTES = 1024 * 1024


_PART_LOCK = re.compile(r"(part-[0-9a-f]{32})\.lock")


@dataclass(slots=True)
class DownloadedFile:
    """An object kept on disk, with the checksums of its blocks."""

    path: Path
    size_bytes: int
    checksums: list[int]
    used_ms: int


class LentFiles:
    """
    Second names of files, each for one table, which takes it away. Thread-safe.

    Args:
        bytes_max: How much the names that no table has taken yet may keep on disk, about.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lent: dict[Path, DownloadedFile] = {}

    def lend(self, file: DownloadedFile, new_path: Callable[[], Path]) -> Path | None:
        """Give a file that was just used another name, and return that; None if it is gone, or too much is lent."""
        if not self._has_room(file.size_bytes):
            return None
        try:
            name = new_path()
            os.link(file.path, name)
        except OSError:
            return None
        self._lent[name] = replace(file)
        return name

    def sweep(self, before_ms: int) -> None:
        """Remove the names of this time and before that no table has taken."""
        for name, file in self._lent.copy().items():
            if file.used_ms <= before_ms:
                remove_file(name)
                self._lent.pop(name, None)

    def _has_room(self, size_bytes: int) -> bool:
        if self._fits(size_bytes):
            return True
        for name in self._lent.copy():
            if not name.exists():
                self._lent.pop(name, None)
        return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return sum(file.size_bytes for file in self._lent.copy().values()) + size_bytes <= self._bytes_max


def is_sound_object(key: str, data: bytes) -> bool:
    """Return whether an object's checksums match; else the next reader downloads it again."""
    try:
        if key.endswith(".seg"):
            decode_object(data, key)
        elif key.endswith(".json"):
            decode_index(data, key)
    except CorruptDataError:
        return False
    return matches_key(key, data)


def blocks_of(data: bytes) -> Sequence[memoryview]:
    """Return the blocks of an object, each with a checksum of its own."""
    view = memoryview(data)
    return [view[begin : begin + _BLOCK_BYTES] for begin in range(0, len(view), _BLOCK_BYTES)]


def read_verified(file: DownloadedFile, offset: int, end: int) -> bytes:
    """Read a part of a file and verify all blocks that it touches; `OSError` for a damaged one."""
    first = offset // _BLOCK_BYTES
    begin = first * _BLOCK_BYTES
    with open(file.path, "rb") as stream:
        stream.seek(begin)
        data = stream.read(min(file.size_bytes, -(-end // _BLOCK_BYTES) * _BLOCK_BYTES) - begin)
    blocks = blocks_of(data)
    expected = file.checksums[first : first + len(blocks)]
    if begin + len(data) < end or [checksum64(block) for block in blocks] != expected:
        raise OSError(f"{file.path} is damaged")
    return data if (begin, begin + len(data)) == (offset, end) else data[offset - begin : end - begin]


def open_part(home: Path, unique_id: str, trust: Trust) -> tuple[Path, int]:
    """Create this process's part of the folder, and remove those of dead processes; `OSError` if creation fails."""
    try:
        make_folder(home, trust)
    except UntrustedFolderError as error:
        raise PermissionError(str(error)) from error
    _remove_stale(home)
    part = home / f"part-{unique_id}"
    lock = open_lock(f"{part}.lock", os.O_CREAT | os.O_EXCL)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(lock).st_nlink:
            raise FileNotFoundError(f"{part}.lock was removed before it was locked")
        part.mkdir(mode=0o700)
    except OSError:
        os.close(lock)
        raise
    return part, lock


def _remove_stale(home: Path) -> None:
    """Remove the parts whose lock is free; a part is created after its lock and removed before it."""
    for name in os.listdir(home):
        mark = _PART_LOCK.fullmatch(name)
        if mark is None:
            continue
        with suppress(OSError):
            lock = open_lock(home / name, 0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its process lives
                remove_part(home, mark[1])
            finally:
                os.close(lock)


def remove_part(home: Path, name: str) -> None:
    """Remove the folder of a process and its lock."""
    shutil.rmtree(home / name, ignore_errors=True)  # does not follow links, `name` included
    remove_file(home / f"{name}.lock")


def remove_file(path: Path) -> None:
    """Remove a file that may be gone already."""
    with suppress(OSError):
        path.unlink()


def is_immutable(key: str) -> bool:
    """Return whether the object of this key never changes."""
    return key.endswith(".seg") or "/materialized/" in key
