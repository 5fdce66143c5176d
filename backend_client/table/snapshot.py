"""
Snapshots of tables: made as hard links for the sidecar to store, and reassembled from its stream and its downloads.

A snapshot is a folder beside the table's slot with the files that RocksDB needs to open it: SST files, MANIFEST and
CURRENT. Every user of such a folder, the sidecar included, holds a shared lock on it. An unlocked one was left by a
crash and is removed when the table is next opened. Imports rocksdict, as `state_table` and `files` do.
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

from rocksdict import AccessType, Checkpoint, Options, Rdict, ReadOptions

from backend_client.table.files import entries_from
from backend_client.table.local_disk import LocalDiskError, is_damage
from dstl_service.wire import FileFrame
from storage.checksum import running_checksum128
from storage.errors import CorruptDataError, DstlError

VERSION_KEY = b"\xff\xffversion"  # sorts after all key groups, which are at most 0x7fff
_DOWNLOAD = re.compile(r"part-[0-9a-f]{32}/[0-9]+")
_BUFFER_BYTES = 1 << 20
_FILE = re.compile(r"[0-9]{6,20}\.sst|MANIFEST-[0-9]{6,20}|CURRENT")

_ONCE = ReadOptions()  # each block is read once, so keeping blocks would only cost time
_ONCE.fill_cache(False)  # type: ignore[call-arg]  # its stubs are wrong
_ONCE.set_readahead_size(256 << 10)


@contextmanager
def making_snapshot(table: Rdict, folder: Path) -> Iterator[None]:
    """
    Make a snapshot in `folder` and lock it until the sidecar has accepted it; on an error, remove it.

    Takes milliseconds: a flush of the table's newest changes, and hard links of its files.

    Raises:
        LocalDiskError: It cannot be made, for example because the disk is full.
    """
    try:
        checkpoint = Checkpoint(table)
        try:
            checkpoint.create_checkpoint(str(folder))
        finally:
            del checkpoint  # it would keep the table locked
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except Exception as error:  # rocksdict raises nothing more specific
        shutil.rmtree(folder, ignore_errors=True)
        raise LocalDiskError(f"no snapshot can be made in {folder}: {error}; check its disk for space") from error
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
    """Remove a snapshot's folder unless it is locked."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


class FileNotHereError(Exception):
    """A file of a snapshot cannot be taken from this host's disk; its bytes must be sent."""


@dataclass(slots=True)
class _OpenFile:
    """A file that is still incomplete."""

    name: str
    source: str
    size_bytes: int
    checksum: str
    descriptor: int
    written: int = 0
    hash: Any = field(default_factory=running_checksum128)


class IncomingSnapshot:
    """
    Writes a snapshot's files piece by piece into a new folder and verifies them; the result can then be opened.

    Args:
        folder: The new folder; an existing one is removed.
        index: Key of the snapshot's index, for messages.
        version: The checkpoint of its table.
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
        Write the next piece, or take the whole file.

        Raises:
            CorruptDataError: It is out of order, or the file differs from what was stored; names the object.
            FileNotHereError: A whole file cannot be taken, or differs from what was stored.
            LocalDiskError: It cannot be written.
        """
        source, name = piece.object_key, piece.name
        try:
            if piece.path:
                self._check_begins(piece)
                _take_file(piece, self.folder / name)
                self.files += 1
                return
            if piece.offset == 0:
                self._check_begins(piece)
                self._begin(piece)
            file = self._open
            if file is None or (file.name, file.written) != (name, piece.offset):
                raise CorruptDataError(f"a piece of object {source} arrived out of order", object_key=source)
            _write(file.descriptor, payload)
            file.written += len(payload)
            file.hash.update(payload)
            if file.written >= file.size_bytes:
                self._finish(file)
        except OSError as error:
            raise _no_room(self.folder, error) from error

    def close(self) -> None:
        """Remove the folder, if it still exists."""
        if self._open is not None:
            with suppress(OSError):
                os.close(self._open.descriptor)
            self._open = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def items(self, first_key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """
        Yield keys and values from `first_key` on.

        Raises:
            CorruptDataError: The files are damaged, or are not the snapshot of its checkpoint; names its index.
            LocalDiskError: Its files cannot be read.
        """
        try:
            table = Rdict(str(self.folder), Options(raw_mode=True), access_type=AccessType.read_only(False))
        except Exception as error:
            raise self.unusable(error) from error
        try:
            self.check_version(table.get(VERSION_KEY))
            try:
                yield from entries_from(table, first_key, _ONCE)
            except Exception as error:  # the files were verified against what was stored
                raise self.unusable(error) from error
        finally:
            table.close()

    def check_version(self, found: Any) -> None:
        """Check the version in a table of these files; `CorruptDataError` if it is another one."""
        if found != self.version.encode():
            raise self._damaged(f"its table has version {found!r} instead of {self.version}")

    def unusable(self, error: Exception) -> DstlError:
        """Return the error for verified files that cannot be opened as a table: damage or the local disk."""
        if isinstance(error, DstlError):
            return error
        if is_damage(error):
            return self._damaged(str(error))
        return LocalDiskError(f"the snapshot {self.index} cannot be used in {self.folder}: {error}; check its disk")

    def _damaged(self, why: str) -> CorruptDataError:
        return CorruptDataError(f"the snapshot {self.index} cannot be used: {why}", object_key=self.index)

    def _check_begins(self, piece: FileFrame) -> None:
        name, source = piece.name, piece.object_key
        if self._open is not None or not _FILE.fullmatch(name):
            raise CorruptDataError(
                f"object {source} arrived out of order, or is not named like a table's file", object_key=source
            )

    def _begin(self, piece: FileFrame) -> None:
        name, source = piece.name, piece.object_key
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._open = _OpenFile(name, source, piece.size_bytes, piece.checksum, descriptor)

    def _finish(self, file: _OpenFile) -> None:
        self._open = None
        os.close(file.descriptor)
        if file.written != file.size_bytes or file.hash.hexdigest() != file.checksum:
            raise CorruptDataError(
                f"object {file.source} is damaged: its checksum does not match", object_key=file.source
            )
        self.files += 1


def _take_file(file: FileFrame, place: Path) -> None:
    """
    Move a file to its place, and verify it.

    The path comes from the service, so only a download is moved: its folder is this user's, and named like one.
    """
    folder, name = os.path.split(file.path)
    if not _DOWNLOAD.fullmatch(f"{os.path.basename(folder)}/{name}"):
        raise FileNotHereError
    hasher, buffer = running_checksum128(), memoryview(bytearray(_BUFFER_BYTES))
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder_fd).st_uid != os.geteuid():
                raise FileNotHereError
            _move(name, folder_fd, place)
        finally:
            os.close(folder_fd)
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as stream:
            while size := stream.readinto(buffer):
                hasher.update(buffer[:size])
    except (OSError, ValueError) as error:  # the latter for a path that no file can have
        raise FileNotHereError from error
    if hasher.hexdigest() != file.checksum:
        raise FileNotHereError


def _move(name: str, folder_fd: int, place: Path) -> None:
    try:
        os.rename(name, place, src_dir_fd=folder_fd)
    except OSError:  # for example to another disk
        os.unlink(name, dir_fd=folder_fd)  # nobody else needs this name of the file
        raise


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _no_room(folder: Path, error: OSError) -> LocalDiskError:
    return LocalDiskError(f"no snapshot can be written to {folder}: {error.strerror}; check its disk for space")
