"""
Caches immutable objects in files on this host's disk, so that tables restored together share downloads.

When a host takes over partitions, each of their tables needs its part of the same segment objects. An object is read
from the store once: readers wait for a running download, later readers read the file.

Best effort (I16): data read from a file is verified by checksums kept in memory, and a file that is damaged, gone or
could never be written only costs a read from the store. Thread-safe.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from dstl_service.formats.materialization_index import matches_checksum, size_in_key
from dstl_service.metrics.downloads import DownloadFigures
from dstl_service.restore.download_files import (
    DownloadedFile,
    LentFiles,
    blocks_of,
    is_immutable,
    is_sound_object,
    open_part,
    read_verified,
    remove_file,
    remove_part,
)
from dstl_service.restore.read_ahead import NOTHING_AHEAD, PART_BYTES_MAX, Part, ReadAhead
from storage.checksum import checksum64, running_checksum128
from storage.clock import Clock, IdSource
from storage.model import ObjectInfo
from storage.object_store import ObjectReader
from storage.private_folder import OWN, Trust

OBJECT_BYTES_MAX = 64 * 1024 * 1024
"""Larger objects are never held in memory completely."""
PIECE_BYTES = PART_BYTES_MAX
"""A larger file of a snapshot is downloaded in pieces of this size, several at a time."""
_SIZES_KNOWN = 100_000

logger = logging.getLogger("dstl_service")


@dataclass(slots=True)
class _Download:
    done: threading.Event = field(default_factory=threading.Event)
    data: bytes | None = None


class DownloadCache:
    """
    Reads objects of `store`; immutable ones through files below `folder`.

    Args:
        store: Holds the objects.
        folder: Parent of this user's folder with the files; None for the system's temporary folder.
        bytes_max: Total size of the files; 0 keeps none, but downloads are still shared.
        idle_s: A file is removed after this time without a read.
        clock: For `idle_s`.
        ids: Names this process's part of the folder.
        trust: Owners whose folders may be on the path to the files.
        ahead: Downloads the pieces of a file.
    """

    def __init__(
        self,
        store: ObjectReader,
        folder: Path | None,
        bytes_max: int,
        idle_s: int,
        clock: Clock,
        ids: IdSource,
        trust: Trust = OWN,
        ahead: ReadAhead = NOTHING_AHEAD,
    ) -> None:
        self._store = store
        self._home = (folder or Path(tempfile.gettempdir())).absolute() / f"dstl-downloads-{os.geteuid()}"
        self._bytes_max = bytes_max
        self._idle_s = idle_s
        self._clock = clock
        self._ids = ids
        self._trust = trust
        self._lock = threading.Lock()
        self._files: OrderedDict[str, DownloadedFile] = OrderedDict()
        self._downloads: dict[str, _Download] = {}
        self._lent = LentFiles(bytes_max)
        self._size_of = lru_cache(_SIZES_KNOWN)(lambda key: store.head(key).size_bytes)  # which never changes
        self._folder: Path | None = None
        self._folder_lock = -1
        self._sweeper: threading.Thread | None = None
        self._closed = threading.Event()
        self._last_name = 0
        self._ahead = ahead
        self.figures = DownloadFigures()

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self._store.url

    def get(self, key: str) -> bytes:
        """Return all bytes of an object; as `ObjectStore.get`."""
        if not is_immutable(key):
            return self._store.get(key)
        data = self._from_file(key, 0, None)
        if data is None:
            data = self._shared(key)
        return self._store.get(key) if data is None else data

    def get_range(self, key: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on; as `ObjectStore.get_range`."""
        if is_immutable(key):
            part = self._from_file(key, offset, size)
            if part is not None:
                return part
            # Other readers will want most of the object.
            file_bytes = size_in_key(key)
            if file_bytes is not None and PIECE_BYTES < file_bytes <= self._bytes_max:
                self._shared_file(key, file_bytes)
                part = self._from_file(key, offset, size)
                if part is not None:
                    return part
            elif (file_bytes or self._size_of(key)) <= OBJECT_BYTES_MAX:
                data = self._shared(key)
                if data is not None and offset + size <= len(data):
                    return data[offset : offset + size]
        return self._store.get_range(key, offset, size)

    def lend(self, key: str, size_bytes: int) -> Path | None:
        """Return a new name of a snapshot's file, for a table to take away; None if it is small, or is not kept."""
        if not PIECE_BYTES < size_bytes <= self._bytes_max:
            return None
        self._shared_file(key, size_bytes)
        file = self._used(key)
        return None if file is None else self._lent.lend(file, self._new_path)

    def head(self, key: str) -> ObjectInfo:
        """Describe an object; as `ObjectStore.head`."""
        return self._store.head(key)

    def sweep(self) -> None:
        """Remove files not read for `idle_s`."""
        before_ms = self._clock.monotonic_ms() - self._idle_s * 1000
        self._lent.sweep(before_ms)
        with self._lock:
            idle = [(key, file) for key, file in self._files.items() if file.used_ms <= before_ms]
        for key, file in idle:
            self._drop(key, file)

    def close(self) -> None:
        """Remove all files; the store stays open. May be called twice; reads continue without files."""
        self._closed.set()
        with self._lock:
            files, self._files = list(self._files.items()), OrderedDict()
            self.figures.bytes_kept = 0
        for _, file in files:
            remove_file(file.path)
        self._leave_folder()

    def _shared(self, key: str) -> bytes | None:
        """Download an object, or wait for a running download; None if that one failed."""

        def download() -> bytes:
            # Another reader may have finished it since this one looked for the file.
            data = self._from_file(key, 0, None)
            if data is None:
                self._count(misses=1)
                data = self._store.get(key)
                self._keep(key, data)
            return data

        return self._led(key, download)

    def _shared_file(self, key: str, size_bytes: int) -> None:
        """Download a large object into a file, or wait for a running download; a failure only costs requests."""

        def download() -> None:
            with self._lock:
                if key in self._files:
                    return
            self._count(misses=1)
            self._download_pieces(key, size_bytes)

        self._led(key, download)

    def _led(self, key: str, act: Callable[[], bytes | None]) -> bytes | None:
        """Run `act` for an object as its first reader, or wait for that reader and return its result."""
        with self._lock:
            download = self._downloads.get(key)
            leads = download is None
            if download is None:
                download = self._downloads[key] = _Download()
        if not leads:
            download.done.wait()
            if download.data is not None:
                self._count(hits=1)
            return download.data
        try:
            download.data = act()
        finally:
            with self._lock:
                del self._downloads[key]
            download.done.set()
        return download.data

    def _used(self, key: str) -> DownloadedFile | None:
        with self._lock:
            if (file := self._files.get(key)) is not None:
                self._files.move_to_end(key)
                file.used_ms = self._clock.monotonic_ms()
            return file

    def _from_file(self, key: str, offset: int, size: int | None) -> bytes | None:
        file = self._used(key)
        if file is None or (end := file.size_bytes if size is None else offset + size) > file.size_bytes:
            return None
        try:
            data = read_verified(file, offset, end)
        except OSError as error:
            self._failed("read", error)
            self._drop(key, file)
            return None
        self._count(hits=1)
        return data

    def _keep(self, key: str, data: bytes) -> None:
        """Write a file, if there is room and the disk accepts it."""
        if len(data) <= min(self._bytes_max, OBJECT_BYTES_MAX) and is_sound_object(key, data):
            self._write(key, len(data), [data])

    def _download_pieces(self, key: str, size_bytes: int) -> None:
        """Download a file of a snapshot piece by piece; keep it if its checksum matches."""
        hasher = running_checksum128()

        def part(begin: int) -> Part[bytes]:
            size = min(PIECE_BYTES, size_bytes - begin)
            return Part(partial(self._store.get_range, key, begin, size), size)

        def pieces() -> Iterator[bytes]:
            for piece in self._ahead.in_order(map(part, range(0, size_bytes, PIECE_BYTES))):
                hasher.update(piece)
                yield piece

        self._write(key, size_bytes, pieces(), lambda: matches_checksum(key, hasher.hexdigest()))

    def _write(
        self, key: str, size_bytes: int, pieces: Iterable[bytes], is_sound: Callable[[], bool] = lambda: True
    ) -> None:
        """Write a file, if there is room and the disk accepts it. All pieces but the last have whole blocks."""
        if self._closed.is_set() or not self._reserve(size_bytes):
            return
        path: Path | None = None
        checksums: list[int] = []
        is_kept = False
        try:
            path = self._new_path()
            with open(path, "xb") as stream:
                for piece in pieces:
                    stream.write(piece)
                    checksums += [checksum64(block) for block in blocks_of(piece)]
            is_kept = is_sound() and self._add(
                key, DownloadedFile(path, size_bytes, checksums, self._clock.monotonic_ms())
            )
        except OSError as error:
            self._failed("write", error)
            if path is not None and not path.parent.exists():  # the folder was deleted; the next file gets a new one
                self._leave_folder()
        finally:
            if not is_kept:
                with self._lock:
                    self.figures.bytes_kept -= 0 if self._closed.is_set() else size_bytes
                if path is not None:
                    remove_file(path)

    def _add(self, key: str, file: DownloadedFile) -> bool:
        """Publish a file to readers; return false if the cache is closed."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._files[key] = file
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep_regularly, name="downloads", daemon=True)
                self._sweeper.start()
        return True

    def _reserve(self, size_bytes: int) -> bool:
        """Make room by removing the least recently read files; return whether there is room now."""
        surplus = []
        with self._lock:
            excess = self.figures.bytes_kept + size_bytes - self._bytes_max
            for key, file in self._files.items():
                if excess <= 0:
                    break
                surplus.append((key, file))
                excess -= file.size_bytes
            if excess > 0:  # others are being written
                return False
            self.figures.bytes_kept += size_bytes
        for key, file in surplus:
            self._drop(key, file)
        return True

    def _new_path(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder, self._folder_lock = open_part(self._home, self._ids.unique_id(), self._trust)
            self._last_name += 1
            return self._folder / str(self._last_name)

    def _leave_folder(self) -> None:
        with self._lock:
            folder, self._folder = self._folder, None
            folder_lock, self._folder_lock = self._folder_lock, -1
        if folder is not None:
            remove_part(self._home, folder.name)
            os.close(folder_lock)

    def _drop(self, key: str, file: DownloadedFile) -> None:
        with self._lock:
            if self._files.get(key) is not file:
                return
            del self._files[key]
            self.figures.bytes_kept -= file.size_bytes
        remove_file(file.path)

    def _failed(self, verb: str, error: OSError) -> None:
        if not self.figures.failures:
            logger.warning("downloads cannot be kept on disk", extra={"error": f"cannot {verb}: {error}"})
        self._count(failures=1)

    def _count(self, hits: int = 0, misses: int = 0, failures: int = 0) -> None:
        with self._lock:
            self.figures.hits += hits
            self.figures.misses += misses
            self.figures.failures += failures

    def _sweep_regularly(self) -> None:
        while not self._closed.wait(self._idle_s / 4):
            self.sweep()
