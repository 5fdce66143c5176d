"""
Snapshots of tables: made as hard links for the sidecar to store, and put together again from what it streams.

A snapshot is a folder beside the table's slot with those files that RocksDB needs to open it: SST files, MANIFEST and
CURRENT. Who works with such a folder holds a shared lock on it, the sidecar too; what nobody holds was left behind by a
crash and goes when the table is opened next. Knows rocksdict, as `state_table` and `files` do.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocksdict import AccessType, Checkpoint, Options, Rdict

from backend_client.table.files import entries_from
from backend_client.table.local_disk import LocalDiskError, is_damage
from dstl_service.wire import FileFrame
from storage.checksum import running_checksum128
from storage.errors import CorruptDataError, DstlError

VERSION_KEY = b"\xff\xffversion"  # behind all key groups: those are at most 0x7fff
_FILE = re.compile(r"[0-9]{6,20}\.sst|MANIFEST-[0-9]{6,20}|CURRENT")


@contextmanager
def making_snapshot(table: Rdict, folder: Path) -> Iterator[None]:
    """
    Make a snapshot in `folder`, and hold it until the sidecar has taken it over; if it does not, remove it.

    Takes as long as flushing the table's newest changes and linking its files: milliseconds.

    Raises:
        LocalDiskError: It cannot be made, for example because the disk is full.
    """
    try:
        checkpoint = Checkpoint(table)
        try:
            checkpoint.create_checkpoint(str(folder))
        finally:
            del checkpoint  # it keeps the table locked
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except Exception as error:  # rocksdict raises nothing more specific
        shutil.rmtree(folder, ignore_errors=True)
        raise LocalDiskError(f"no snapshot can be made in {folder}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        for name in os.listdir(folder):
            if not _FILE.fullmatch(name):
                os.unlink(folder / name)  # RocksDB's options and its log, which is not used
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remove_left_behind(folder: Path) -> None:
    """Remove a snapshot's folder unless somebody works with it."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


@dataclass(slots=True)
class _OpenFile:
    """A file of which not all pieces have come yet."""

    name: str
    source: str
    size_bytes: int
    checksum: str
    descriptor: int
    written: int = 0
    hash: Any = field(default_factory=running_checksum128)


class IncomingSnapshot:
    """
    Takes a snapshot's files piece by piece into a fresh folder, and opens it when all are verified.

    Args:
        folder: Where; what lies there is removed.
        index: Key of the snapshot's index, for messages.
        version: The checkpoint at which its table stood.
    """

    def __init__(self, folder: Path, index: str, version: str) -> None:
        self.folder = folder
        self.index = index
        self.version = version
        self.files = 0
        self._open: _OpenFile | None = None
        try:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise _no_room(folder, error) from error

    def take(self, piece: FileFrame, payload: bytes) -> None:
        """
        Take the next piece.

        Raises:
            CorruptDataError: It does not fit, or the file is not what was stored; names the object.
            LocalDiskError: It cannot be written.
        """
        source, name = piece.object_key, piece.name
        try:
            if piece.offset == 0:
                self._begin(piece)
            file = self._open
            if file is None or (file.name, file.written) != (name, piece.offset):
                raise CorruptDataError(f"a piece of object {source} came out of order", object_key=source)
            _write(file.descriptor, payload)
            file.written += len(payload)
            file.hash.update(payload)
            if file.written >= file.size_bytes:
                self._finish(file)
        except OSError as error:
            raise _no_room(self.folder, error) from error

    def close(self) -> None:
        """Remove what is left of the folder."""
        if self._open is not None:
            with suppress(OSError):
                os.close(self._open.descriptor)
            self._open = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def items(self, first_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """
        Yield keys and values from `first_key` on.

        Raises:
            CorruptDataError: The snapshot is not that of its checkpoint; names its index.
            LocalDiskError: Its files cannot be read.
        """
        try:
            table = Rdict(str(self.folder), Options(raw_mode=True), access_type=AccessType.read_only(False))
        except Exception as error:
            raise self.unusable(error) from error
        try:
            self.check_version(table.get(VERSION_KEY))
            try:
                yield from entries_from(table, first_key)
            except Exception as error:  # the files are as they were stored
                raise self.unusable(error) from error
        finally:
            table.close()

    def check_version(self, found: Any) -> None:
        """Compare the version that a table of these files has; `CorruptDataError` if it is another one."""
        if found != self.version.encode():
            raise self._damaged(f"its table stands at {found!r}, not at {self.version}")

    def unusable(self, error: Exception) -> DstlError:
        """Return what it means that its files, all verified, cannot be used as a table: damage, or the local disk."""
        if isinstance(error, DstlError):
            return error
        if is_damage(error):
            return self._damaged(str(error))
        return LocalDiskError(f"the snapshot {self.index} cannot be used in {self.folder}: {error}; is its disk full?")

    def _damaged(self, why: str) -> CorruptDataError:
        return CorruptDataError(f"the snapshot {self.index} cannot be used: {why}", object_key=self.index)

    def _begin(self, piece: FileFrame) -> None:
        name, source = piece.name, piece.object_key
        if self._open is not None or not _FILE.fullmatch(name):
            raise CorruptDataError(
                f"object {source} came out of order or has no name of a table's file", object_key=source
            )
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open = _OpenFile(name, source, piece.size_bytes, piece.checksum, descriptor)

    def _finish(self, file: _OpenFile) -> None:
        self._open = None
        os.close(file.descriptor)
        if file.written != file.size_bytes or file.hash.hexdigest() != file.checksum:
            raise CorruptDataError(
                f"object {file.source} is damaged: its checksum does not fit", object_key=file.source
            )
        self.files += 1


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _no_room(folder: Path, error: OSError) -> LocalDiskError:
    return LocalDiskError(f"no snapshot can be put into {folder}: {error.strerror}; is its disk full?")
