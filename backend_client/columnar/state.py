"""
A columnar operator's state in its table: read for many keys at once, written as sorted columns of a change set.

An entry's table key is key group | state id | key (| start of its window). If state ends by itself, the first 8 bytes
of the value are its end, and an *index* entry with an empty value has the table key
key group | index id | end (8 bytes, sorted as times) | key, so that ended state is found without a full scan. Both are
ordinary entries of table and log, so restore, rescaling, snapshots and compaction need not know them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.packing import joined, of_equal_width
from backend_client.columnar.processor import KeyResults
from backend_client.columnar.values import Bools, Ints, StateColumns, split_heads
from backend_client.state.keyed_state import table_key
from storage.change_set import ChangeColumns
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange

STATE, INDEX = "columns", "ends"
"""The names, and the kinds, of an operator's two variables."""

_END = struct.Struct(">Q")
_SIGN = 1 << 63
_HEAD_BYTES = 4
"""A table key begins with the key group and the number of the variable, two bytes each."""
_ENDED_MAX = 100_000
_ENDED_BYTES_MAX = 16 << 20
"""Ended state is processed in parts: `_ENDED_MAX` bounds many short keys, this bounds long ones."""

ReadMany = Callable[[pa.Array, float], pa.Array]
ScanBetween = Callable[[Iterable[tuple[bytes, bytes]]], Iterator[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class Found:
    """State of some keys, one row per key; `ends_ms` is valid where state is present and ends by itself."""

    columns: pa.RecordBatch
    present: Bools
    ends_ms: Ints


class ColumnarState:
    """
    Reads and encodes the entries of one task.

    Args:
        codec: Codec of the state's columns.
        key_groups: The partition's key groups.
        state_id: Number of the entries' variable.
        index_id: Number of the index of ends; None if state does not end by itself.
        read_many: Reads table entries, given the share of the table between the first and the last.
        scan: Yields the table's entries in ranges of keys, each from one key to another, exclusive.
    """

    def __init__(
        self,
        codec: StateColumns,
        key_groups: KeyGroupRange,
        state_id: int,
        index_id: int | None,
        read_many: ReadMany,
        scan: ScanBetween,
    ) -> None:
        self._codec = codec
        self._key_groups = key_groups
        self._state_id = state_id
        self._index_id = index_id
        self._read_many = read_many
        self._scan = scan
        groups = range(key_groups.first, key_groups.last + 1)
        self._index_heads = {group: table_key(group, index_id, b"") for group in groups} if index_id is not None else {}

    def entries(self, key_groups: Ints, *keys: pa.Array) -> pa.Array:
        """Return the table keys of encoded keys, each with optional further parts."""
        heads = np.stack([key_groups, np.full(len(key_groups), self._state_id)], axis=1).astype(">u2")
        return joined(of_equal_width(heads.view(np.uint8)), *keys)

    def read(self, entries: pa.Array, watermark_ms: int | None) -> Found:
        """
        Return the state of these entries; ended state counts as absent.

        Raises:
            CorruptDataError: A stored value cannot be read.
        """
        first, last = (int.from_bytes(entry.as_py()[:2], "big") for entry in (entries[0], entries[-1]))
        covered = (last - first + 1) / (self._key_groups.last - self._key_groups.first + 1)
        values = self._read_many(entries, covered)
        ends = np.zeros(len(values), np.int64)
        if self._index_id is not None:
            values, ends = _without_ends(values)
            if watermark_ms is not None:
                values = pc.if_else(pa.array(ends > watermark_ms), values, pa.scalar(None, pa.binary()))
        columns, present = self._codec.decode(values)
        return Found(columns, present, ends)

    def changes(self, entries: pa.Array, found: Found, results: KeyResults, ends_ms: Ints | None) -> ChangeColumns:
        """Return the changes that give these entries a processor's results, with state that ends at `ends_ms`."""
        values, present = self._codec.encode(results.state), found.present
        kept = np.ones(len(entries), np.bool_) if results.keep is None else results.keep
        written = kept if results.changed is None else kept & (results.changed | ~present)
        if ends_ms is not None:
            values = joined(of_equal_width(_end_bytes(ends_ms)), values)
            written = written | (kept & (ends_ms != found.ends_ms))
        gone = ~kept & present
        values = pc.if_else(pa.array(kept), values, pa.scalar(None, pa.binary())) if gone.any() else values
        needed = pa.array(written | gone)
        keys, values = entries.filter(needed), values.filter(needed)
        if ends_ms is not None:
            moved = ends_ms != found.ends_ms
            old = np.flatnonzero(present & (moved | ~kept))
            new = np.flatnonzero(kept & (moved | ~present))
            of_old = self._index_keys(entries.take(pa.array(old)), found.ends_ms[old])
            of_new = self._index_keys(entries.take(pa.array(new)), ends_ms[new])
            marks = pa.repeat(pa.scalar(b"", pa.binary()), len(new))
            keys = pa.concat_arrays([keys, of_old, of_new])
            values = pa.concat_arrays([values, pa.nulls(len(old), pa.binary()), marks])
        return _sorted(keys, values)

    def ended(self, watermark_ms: int) -> Iterator[tuple[list[bytes], pa.RecordBatch, ChangeColumns]]:
        """
        Yield the state that ends at this watermark: keys without key group and state id, state, changes that remove it.

        Raises:
            CorruptDataError: The index names a missing entry.
        """
        # One range after the other: changes overlaid meanwhile may have become part of another table.
        for found in _in_parts(chain.from_iterable(self._scan([one]) for one in self._ended(watermark_ms, None))):
            index = pa.array(found, pa.binary())
            entries = self._entries_of(index)
            entries = entries.take(pc.sort_indices(entries))
            values, _ = _without_ends(self._read_many(entries, 1.0))
            columns, present = self._codec.decode(values)
            if not present.all():
                raise CorruptDataError("the index of a columnar operator's state names missing entries")
            yield [entry[_HEAD_BYTES:] for entry in entries.to_pylist()], columns, _removed(entries, index)

    def removal(self, watermark_ms: int, removed_ms: int | None) -> Iterator[ChangeColumns]:
        """
        Yield the changes that remove the state that ends at this watermark, without reading it.

        State that ends up to `removed_ms` is gone: RocksDB would search for it among the marks of deleted entries.
        """
        for found in _in_parts(self._scan(self._ended(watermark_ms, removed_ms))):
            index = pa.array(found, pa.binary())
            yield _removed(self._entries_of(index), index)

    def _ended(self, watermark_ms: int, removed_ms: int | None) -> list[tuple[bytes, bytes]]:
        """Return the ranges of the index that hold state ending at this watermark and after `removed_ms`."""
        low, high = b"" if removed_ms is None else _end(removed_ms + 1), _end(watermark_ms + 1)
        return [(head + low, head + high) for head in self._index_heads.values()]

    def _entries_of(self, index: pa.Array) -> pa.Array:
        """Return the keys of the entries that these keys of the index stand for."""
        heads, keys = split_heads(index, _HEAD_BYTES + _END.size)
        heads[:, 2:_HEAD_BYTES] = np.frombuffer(table_key(0, self._state_id, b""), np.uint8)[2:]
        return joined(of_equal_width(heads[:, :_HEAD_BYTES]), keys)

    def next_end_ms(self, watermark_ms: int | None) -> int | None:
        """Return when, in ms, the first stored state after a watermark (None: of all) ends; None if none does."""
        ends = []
        for group, head in self._index_heads.items():
            low = head if watermark_ms is None else head + _end(watermark_ms + 1)
            high = table_key(group, int(self._index_id or 0) + 1, b"")
            first = islice(self._scan([(low, high)]), 1)
            ends += [index_key[len(head) : len(head) + _END.size] for index_key, _ in first]
        return _END.unpack(min(ends))[0] - _SIGN if ends else None

    def _index_keys(self, entries: pa.Array, ends_ms: Ints) -> pa.Array:
        """Return the keys of the index entries of these entries, which end at these times."""
        heads, keys = split_heads(entries, _HEAD_BYTES)
        heads[:, 2:] = np.frombuffer(table_key(0, int(self._index_id or 0), b""), np.uint8)[2:]
        return joined(of_equal_width(np.hstack([heads, _end_bytes(ends_ms)])), keys)


def _in_parts(found: Iterator[tuple[bytes, bytes]]) -> Iterator[list[bytes]]:
    """Yield the keys of entries in parts of bounded size."""
    part: list[bytes] = []
    size_bytes = 0
    for key, _ in found:
        part.append(key)
        size_bytes += len(key)
        if len(part) >= _ENDED_MAX or size_bytes >= _ENDED_BYTES_MAX:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _removed(entries: pa.Array, index: pa.Array) -> ChangeColumns:
    gone = pa.concat_arrays([entries, index])
    return _sorted(gone, pa.nulls(len(gone), pa.binary()))


def _without_ends(values: pa.Array) -> tuple[pa.Array, Ints]:
    heads, rest = split_heads(values, _END.size)
    ends = (heads.reshape(-1).view(">u8") ^ np.uint64(_SIGN)).astype(np.uint64).view(np.int64)
    return rest, ends


def _end(end_ms: int) -> bytes:
    return _END.pack(end_ms + _SIGN)


def _end_bytes(ends_ms: Ints) -> npt.NDArray[np.uint8]:
    """Return what `_end` returns, one row per time."""
    ends = (ends_ms.view(np.uint64) ^ np.uint64(_SIGN)).astype(">u8")
    return ends.view(np.uint8).reshape(-1, _END.size)


def _sorted(keys: pa.Array, values: pa.Array) -> ChangeColumns:
    if len(keys) > 1 and not pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py():
        order = pc.sort_indices(keys)
        keys, values = keys.take(order), values.take(order)
    return ChangeColumns(keys, values)
