"""
A table's newest changes as a file beside it, so that not every batch writes to RocksDB.

Opening a table for writing, and closing it, waits for the disk several times, whatever is written; opening it to read
takes a tenth of that. And batches often change the same keys again. So the changes of a few batches are appended here,
in columns as they arrive, and overlay the table on reads, until they are worth a write; then only the last change of
each key is written.
Like the table, the journal is a cache (I16): each record names the version at which it begins, and a record that is
damaged, or does not follow from the table's version, is ignored. Nothing waits for the disk.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.change_set import ChangeColumns, decode_columns, encode_columns
from storage.checksum import checksum64
from storage.errors import CorruptDataError

CHANGES_MAX = 1 << 18
BYTES_MAX = 16 << 20
"""Bounds of the changes kept in memory and in the file: `CHANGES_MAX` for many small ones, this for few large ones."""
RECORDS_MAX = 16
# A look-up in columns takes as long as putting about this many changes into a dictionary.
_CHANGES_PER_LOOK_UP = 100
_LAYER_CHANGES_MIN = 4096
MISSING = object()
_NONE = pa.array([], pa.binary())

# A record: the checksum and the size of its body; there the size of its head, the head, and the changes.
_FRAME = struct.Struct("<QQ")
_SIZE_BYTES = 4


def memory_bytes(part: ChangeColumns) -> int:
    """Return the memory that a part holds: its whole buffers, even if it is a slice of them. Cheap."""
    return int(part.keys.get_total_buffer_size() + part.values.get_total_buffer_size())


class Layer:
    """
    Changes of one or more batches, for reads of single keys.

    Args:
        parts: Oldest first; changes in later parts win.
    """

    def __init__(self, parts: Sequence[ChangeColumns]) -> None:
        self._parts = parts
        self._left = sum(len(part.keys) for part in parts)
        self.get: Callable[[bytes, object], Any] = self._looked_up
        """Returns a key's last change, or the given default if it was not changed."""

    def _looked_up(self, key: bytes, missing: object) -> Any:
        self._left -= _CHANGES_PER_LOOK_UP * len(self._parts)
        if self._left < 0:
            changes: dict[bytes, bytes | None] = {}
            for part in self._parts:
                changes.update(part.pairs())
            self.get = changes.get
            return changes.get(key, missing)
        for part in reversed(self._parts):
            at = bisect_left(_Values(part.keys), key)
            if at < len(part.keys) and part.keys[at].as_py() == key:
                return part.values[at].as_py()
        return missing


class TableJournal:
    """
    The changes that overlay one table.

    `version` is the checkpoint that the changes reach; None without any.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size_bytes = 0
        self._parts: list[ChangeColumns] = []
        self._records = 0
        self._rows = 0
        self._memory_bytes = 0
        self._sorted: tuple[list[bytes], dict[bytes, bytes | None]] | None = None
        self._left = 0
        """Remaining cost of look-ups, in changes, before all changes are put into `_sorted`."""
        self.version: str | None = None

    def __len__(self) -> int:
        """Return the number of changes; a key counts once per change."""
        return self._rows

    @property
    def is_kept(self) -> bool:
        """Whether the table's last changes were few, so that the next ones probably are, too."""
        return self._path.exists()

    def has_room(self, part: ChangeColumns) -> bool:
        """Return whether another part fits into memory."""
        return self._rows + len(part.keys) <= CHANGES_MAX and self._memory_bytes + memory_bytes(part) <= BYTES_MAX

    def load(self, version: str | None) -> None:
        """Read the records that follow from the table's version."""
        at = 0
        for begin, end, parts, next_at in _records(self._path.read_bytes()):
            if begin != (self.version or version):
                break
            self.add(parts, end)
            at = next_at
        self._size_bytes = at

    def append(self, parts: Sequence[ChangeColumns], version: str | None, new_version: str) -> bool:
        """
        Keep the changes that lead from one version to the next; later parts win.

        Returns False if there are too many, the table has no version to start from, or the file cannot be written; a
        partial record is ignored.
        """
        rows = sum(len(part.keys) for part in parts)
        if version is None or self._rows + rows > CHANGES_MAX or self._records >= RECORDS_MAX:
            return False
        if self._size_bytes + sum(map(memory_bytes, parts)) > BYTES_MAX:  # before they are encoded
            return False
        record = _record(parts, version, new_version)
        try:
            with open(self._path, "r+b") as file:
                file.truncate(self._size_bytes)
                file.seek(self._size_bytes)
                file.write(record)
        except OSError:
            return False
        self._size_bytes += len(record)
        self.add(parts, new_version)
        return True

    def add(self, parts: Sequence[ChangeColumns], version: str) -> None:
        """Add changes that lead to a version, in memory only."""
        self._parts += parts
        self._records += 1
        self._rows += sum(len(part.keys) for part in parts)
        self._memory_bytes += sum(map(memory_bytes, parts))
        self._sorted, self._left = None, self._rows
        self.version = version

    def forget(self) -> None:
        """Drop the changes from memory, because the table has them; the file stays until `end`."""
        self._parts, self._records, self._rows, self._memory_bytes = [], 0, 0, 0
        self.version, self._sorted = None, None

    def hold(self, parts: Sequence[ChangeColumns]) -> None:
        """Serve reads of changes that the table has from memory; the file does not contain them."""
        self.forget()
        self._parts, self._rows = list(parts), sum(len(part.keys) for part in parts)
        self._memory_bytes = sum(map(memory_bytes, parts))
        self._left = self._rows

    def end(self, *, keep: bool) -> None:
        """Remove the file, or empty it for the next changes; only after the table's files have all its changes."""
        with suppress(OSError):  # a journal that does not follow from the table is ignored
            if keep:
                self._path.write_bytes(b"")
            else:
                os.unlink(self._path)

    def latest(self) -> ChangeColumns:
        """Return the last change of each key, once; the newest parts come first."""
        parts = [*reversed(self._parts), ChangeColumns(_NONE, _NONE)]
        keys, values = map(pa.concat_arrays, zip(*parts, strict=True))
        # Indices number keys by first occurrence, so an index above all earlier ones marks a first occurrence.
        numbers = keys.dictionary_encode().indices.to_numpy()
        is_first = pa.array(numbers > np.maximum.accumulate(np.concatenate(([-1], numbers)))[:-1])
        return ChangeColumns(keys.filter(is_first), values.filter(is_first))

    def layers(self) -> list[Layer]:
        """Return layers for look-ups, newest first: the first layer with a key has its last change."""
        layers, parts, rows = [], list[ChangeColumns](), 0
        for part in reversed(self._parts):
            parts.insert(0, part)
            rows += len(part.keys)
            if rows >= _LAYER_CHANGES_MIN:
                layers.append(Layer(parts))
                parts, rows = [], 0
        return [*layers, Layer(parts)] if parts else layers

    def find_many(self, keys: pa.Array) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
        """Return the last changes of keys, each given once, null for others, and which keys were changed."""
        rows = np.full(len(keys), -1, np.int64)
        left = np.arange(len(keys))
        values: list[pa.Array] = []
        before = 0
        for parts in (self._parts[-1:], self._parts[:-1]):  # the newest part often has all of them
            if not parts or not len(left):
                break
            changed, of_parts = map(pa.concat_arrays, zip(*parts, strict=True))
            # The keys are fewer than the changes, and to put them into a hash table takes longer than to look them up.
            at = pc.index_in(changed, value_set=keys.take(pa.array(left)))
            is_meant = np.flatnonzero(at.is_valid().to_numpy(zero_copy_only=False))
            rows[left[at.drop_null().to_numpy()]] = (
                before + is_meant
            )  # of several changes of a key, the last one counts
            values.append(of_parts)
            before += len(of_parts)
            left = left[rows[left] < 0]
        found = rows >= 0
        return pa.concat_arrays([*values, _NONE]).take(pa.array(rows, mask=~found)), found

    def over(
        self, stored: Iterator[tuple[bytes, bytes]], low: bytes, high: bytes | None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield stored entries overlaid with the changes from `low` to `high`, exclusive, in key order."""
        keys, changes = self._between(low, high)
        begin = bisect_left(keys, low)
        end = len(keys) if high is None else bisect_left(keys, high)
        if begin == end:
            yield from stored
            return
        at = begin
        for key, value in stored:
            while at < end and keys[at] < key:
                yield from _entry(keys[at], changes)
                at += 1
            if at < end and keys[at] == key:
                yield from _entry(key, changes)
                at += 1
            else:
                yield key, value
        for rest in range(at, end):
            yield from _entry(keys[rest], changes)

    def _between(self, low: bytes, high: bytes | None) -> tuple[list[bytes], dict[bytes, bytes | None]]:
        """Return the sorted keys of at least the changes in this range, and those changes."""
        if self._sorted is None:
            self._left -= 2 * _CHANGES_PER_LOOK_UP * len(self._parts)
            parts = [_slice(part, low, high) for part in self._parts] if self._left >= 0 else self._parts
            changes = dict(pair for part in parts for pair in part.pairs())
            if self._left >= 0:
                return sorted(changes), changes
            self._sorted = sorted(changes), changes
        return self._sorted


class _Values(Sequence[bytes]):
    """A binary column as a sequence of bytes; creates only the requested values."""

    def __init__(self, column: pa.Array) -> None:
        _, offsets, data = column.buffers()
        self._rows = len(column)
        self._first = column.offset
        # Arrow's own access to a value takes several times as long.
        self._offsets = memoryview(b"" if offsets is None else offsets).cast("B").cast("i")
        self._data = memoryview(b"" if data is None else data)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: Any) -> Any:
        begin = self._first + row
        return self._data[self._offsets[begin] : self._offsets[begin + 1]].tobytes()


def _slice(part: ChangeColumns, low: bytes, high: bytes | None) -> ChangeColumns:
    keys = _Values(part.keys)
    begin = bisect_left(keys, low)
    rows = max(0, (len(keys) if high is None else bisect_left(keys, high)) - begin)
    return ChangeColumns(part.keys.slice(begin, rows), part.values.slice(begin, rows))


def _entry(key: bytes, changes: dict[bytes, bytes | None]) -> Iterator[tuple[bytes, bytes]]:
    value = changes[key]
    if value is not None:
        yield key, value


def _record(parts: Sequence[ChangeColumns], version: str, new_version: str) -> bytes:
    payloads = [encode_columns(part, compression=None) for part in parts]
    head = msgpack.packb([version, new_version, [len(payload) for payload in payloads]])
    body = b"".join([len(head).to_bytes(_SIZE_BYTES, "little"), head, *payloads])
    return b"".join([_FRAME.pack(checksum64(body), len(body)), body])


def _records(data: bytes) -> Iterator[tuple[str, str, list[ChangeColumns], int]]:
    """
    Yield begin, end, changes, and the next record's offset; stop at a damaged or truncated record.

    The changes are views of `data`, because tables are opened more often than their journals are written.
    """
    left = memoryview(data)
    with suppress(ValueError, TypeError, struct.error, msgpack.UnpackException, CorruptDataError):
        while left:
            checksum, body_bytes = _FRAME.unpack_from(left)
            record_bytes = _FRAME.size + body_bytes
            body, left = left[_FRAME.size : record_bytes], left[record_bytes:]
            if checksum64(body) != checksum:
                return
            at = _SIZE_BYTES + int.from_bytes(body[:_SIZE_BYTES], "little")
            begin, end, sizes = msgpack.unpackb(body[_SIZE_BYTES:at])
            parts = []
            for size in sizes:
                parts.append(decode_columns(body[at : at + size], "a table's journal"))
                at += size
            yield begin, end, parts, len(data) - len(left)
