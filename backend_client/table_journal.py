"""
A table's newest changes as a file beside it, for batches so small that opening RocksDB for writing would cost the most.

Opening a table for writing, and closing it, waits several times for the disk, whatever is written; opening it to read
takes a tenth of that. So few changes are appended here, and are read over the table, until they are worth a write.
The journal belongs to the table as a cache does (I16): each record names the version at which it begins, and what does
not follow from the table's version, or is damaged, counts for nothing. Nothing waits for the disk.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgpack

from storage.checksum import checksum64

CHANGES_MAX = 2048
BYTES_MAX = 512 << 10

Change = tuple[bytes, bytes | None]


class TableJournal:
    """
    What is to be read over one table.

    `changes` has the last change per key, `version` the checkpoint to which they lead; it is None without any.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size_bytes = 0
        self._keys: list[bytes] = []
        self.changes: dict[bytes, bytes | None] = {}
        self.version: str | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the table's last changes were few, so that the next ones probably are."""
        return self._path.exists()

    def load(self, version: str | None) -> None:
        """Read what follows from the table's version."""
        data = self._path.read_bytes()
        at = 0
        for begin, end, changes, behind in _records(data):
            if begin != (self.version or version):
                break
            self._take(changes, end)
            at = behind
        self._size_bytes = at

    def append(self, changes: Sequence[Change], version: str | None, new_version: str) -> bool:
        """
        Keep the changes that lead from one version to the next.

        Returns False if they are too many, or the table has no version from which they could lead on.
        """
        if version is None or len(self.changes) + len(changes) > CHANGES_MAX:
            return False
        record = _record(changes, version, new_version)
        if self._size_bytes + len(record) > BYTES_MAX:
            return False
        with open(self._path, "r+b") as file:
            file.truncate(self._size_bytes)
            file.seek(self._size_bytes)
            file.write(record)
        self._size_bytes += len(record)
        self._take(changes, new_version)
        return True

    def forget(self) -> None:
        """Drop the changes from memory, for the table has them now; the file stays until `end`."""
        self.changes, self.version, self._keys = {}, None, []

    def end(self, *, keep: bool) -> None:
        """Remove the file, or empty it for the next changes; only when the table's files have all that it held."""
        with suppress(OSError):  # a journal that does not fit the table counts for nothing
            if keep:
                self._path.write_bytes(b"")
            else:
                os.unlink(self._path)

    def over(
        self, stored: Iterator[tuple[bytes, bytes]], low: bytes, high: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield stored entries, and the changes from `low` up to `high`, without it, over them, by ascending keys."""
        begin = bisect_left(self._keys, low)
        end = len(self._keys) if high is None else bisect_left(self._keys, high)
        if begin == end:
            yield from stored
            return
        at = begin
        for key, value in stored:
            while at < end and self._keys[at] < key:
                yield from self._entry(at)
                at += 1
            if at < end and self._keys[at] == key:
                yield from self._entry(at)
                at += 1
            else:
                yield key, value
        for rest in range(at, end):
            yield from self._entry(rest)

    def _entry(self, at: int) -> Iterator[tuple[bytes, bytes]]:
        key = self._keys[at]
        value = self.changes[key]
        if value is not None:
            yield key, value

    def _take(self, changes: Sequence[Change], version: str) -> None:
        self.changes.update(changes)
        self.version = version
        self._keys = sorted(self.changes)


def _record(changes: Sequence[Change], version: str, new_version: str) -> bytes:
    body: bytes = msgpack.packb([version, new_version, [part for change in changes for part in change]])
    record: bytes = msgpack.packb([checksum64(body), body])
    return record


def _records(data: bytes) -> Iterator[tuple[str, str, list[Change], int]]:
    """Yield begin, end, changes, and where the next record begins; stop at what is damaged or cut off."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data) or 1)
    unpacker.feed(data)
    with suppress(ValueError, TypeError, msgpack.UnpackException):
        for checksum, body in unpacker:
            if checksum64(body) != checksum:
                return
            begin, end, flat = msgpack.unpackb(body)
            yield begin, end, list(zip(flat[::2], flat[1::2], strict=True)), unpacker.tell()
