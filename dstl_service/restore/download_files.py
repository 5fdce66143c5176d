"""
The files of a cache of downloads, and the folder of the process that keeps them. Blocking I/O.

    <folder>/dstl-downloads-<uid>/      this user's alone, and what is in it follows no link
      part-<id>.lock                    locked while its process lives
      part-<id>/                        the files of one process, for they are of no use to another one

Nothing else is ever removed than parts of dead processes: a part is known by its name and its lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstl_service.formats.materialization_index import matches_key
from storage.checksum import checksum64
from storage.errors import CorruptDataError
from storage.private_folder import Trust, UntrustedFolderError, make_folder, open_lock
from storage.segment_format import decode_object

_BLOCK_BYTES = 1024 * 1024


_PART_LOCK = re.compile(r"(part-[0-9a-f]{32})\.lock")


@dataclass(slots=True)
class DownloadedFile:
    """An object that is kept on disk, and the checksums of its blocks."""

    path: Path
    size_bytes: int
    checksums: list[int]
    used_ms: int


def is_sound_object(key: str, data: bytes) -> bool:
    """Say whether an object came through whole, as far as can be told; the next reader may have more luck."""
    if key.endswith(".seg"):
        try:
            decode_object(data, key)
        except CorruptDataError:
            return False
    return matches_key(key, data)


def blocks_of(data: bytes) -> Sequence[memoryview]:
    """Return the parts of an object that have checksums of their own."""
    view = memoryview(data)
    return [view[begin : begin + _BLOCK_BYTES] for begin in range(0, len(view), _BLOCK_BYTES)]


def read_verified(file: DownloadedFile, offset: int, end: int) -> bytes:
    """Read a part of a file, whole blocks of which are compared with their checksums; `OSError` for a damaged one."""
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
    """Make this process's part of the folder, and remove those of dead ones; `OSError` if that cannot be done."""
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
    """Remove the parts whose lock nobody holds; a part is made after its lock and removed before it."""
    for name in os.listdir(home):
        mark = _PART_LOCK.fullmatch(name)
        if mark is None:
            continue
        with suppress(OSError):
            lock = open_lock(home / name, 0)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if its process lives
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
    """Say whether the object of this key never changes."""
    return key.endswith(".seg") or "/materialized/" in key
