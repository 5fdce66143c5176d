"""
The bytes of a change set: changed keys with their last value, sorted by key, as one compressed Arrow IPC stream.

Columns: ``key`` binary, ``value`` binary or null for a deleted key. A key begins with its key group, two bytes,
big-endian. No I/O.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.checksum import BytesLike
from storage.errors import CorruptDataError, OverloadedError
from storage.key_groups import KeyGroupRange

# Bounds of the changes that are put into columns together; sizes are summed once per `_CHANGES_PER_LOOK` changes.
_CHANGES_AT_ONCE = 50_000
_BYTES_AT_ONCE = 16 << 20
_CHANGES_PER_LOOK = 64

DECODED_BYTES_FLOOR = 64 << 20
DECODED_RATIO_MAX = 256
"""A reader accepts payloads that grow at most by this factor, or to the floor; others are stored uncompressed."""

_ROW_BYTES, _MESSAGE_BYTES = 40, 512
"""What a row, and a message of Arrow's, count in a merge beside their bytes: what they take of its memory, in part."""

_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF
_V5, _SCHEMA_MESSAGE, _BATCH_MESSAGE = 4, 1, 3
_BUFFER = struct.Struct("<qq")
_U16, _U32, _I32, _I64 = (struct.Struct(f"<{form}") for form in "HIiq")

Compression: TypeAlias = Literal["zstd"] | None

SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
# Without Arrow's thread pool: two buffers per change set and one core per task make handing over too costly.
_WRITE_OPTIONS = {
    compression: pa.ipc.IpcWriteOptions(compression=compression, use_threads=False) for compression in ("zstd", None)
}
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


class ChangeColumns(NamedTuple):
    """Changes as binary columns: keys ascending and unique; a null value deletes."""

    keys: pa.Array
    values: pa.Array

    @classmethod
    def of(cls, changes: Mapping[bytes, bytes | None]) -> ChangeColumns:
        """Put changes into columns."""
        keys = sorted(changes)
        return cls(pa.array(keys, pa.binary()), pa.array([changes[key] for key in keys], pa.binary()))

    def pairs(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield (key, value or None) in key order."""
        return zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True)

    def of_key_groups(self, key_groups: KeyGroupRange) -> ChangeColumns:
        """Return the changes of some key groups."""
        begin, end = _rows_of(self.keys, key_groups)
        return ChangeColumns(self.keys.slice(begin, end - begin), self.values.slice(begin, end - begin))

    def pieces(self, size_bytes: int) -> Iterator[ChangeColumns]:
        """Yield the changes in parts of about this size in bytes; one of several changes exceeds it by at most one."""
        for begin, end in _parts(self, size_bytes):
            yield ChangeColumns(self.keys.slice(begin, end - begin), self.values.slice(begin, end - begin))


def in_columns(changes: Iterable[tuple[bytes, bytes | None]]) -> Iterator[ChangeColumns]:
    """Put any number of changes into columns, in parts; later changes, and later parts, win."""
    left, turn, size_bytes = iter(changes), dict[bytes, bytes | None](), 0
    while some := dict(islice(left, _CHANGES_PER_LOOK)):
        turn |= some
        size_bytes += sum(map(len, filter(None, some.values())))
        if len(turn) >= _CHANGES_AT_ONCE or size_bytes >= _BYTES_AT_ONCE:
            yield ChangeColumns.of(turn)
            turn, size_bytes = {}, 0
    if turn:
        yield ChangeColumns.of(turn)


def encode_change_set(changes: Mapping[bytes, bytes | None]) -> bytes:
    """Return the payload of a segment; one without any key says that nothing exists, if it is a base."""
    return encode_columns(ChangeColumns.of(changes))


def encode_columns(changes: ChangeColumns, compression: Compression = "zstd") -> bytes:
    """Return the payload of a segment with these columns."""
    payload = _encoded(changes, compression)
    if compression is not None and changes.keys.nbytes + changes.values.nbytes > _decoded_bytes_max(payload) // 2:
        return _encoded(changes, None)  # compressed so well that a reader would refuse it
    return payload


def decode_change_set(payload: BytesLike, source: str) -> Iterable[tuple[bytes, bytes | None]]:
    """
    Yield (key, value or None) in key order.

    Raises:
        CorruptDataError: The payload is not a change set; names `source`.
    """
    return decode_columns(payload, source).pairs()


def decode_columns(payload: BytesLike, source: str) -> ChangeColumns:
    """
    Return the changes as columns.

    Raises:
        CorruptDataError: The payload is not a change set; names `source`.
    """
    columns = _decode(payload, source).combine_chunks().columns
    return ChangeColumns(*(column.chunk(0) if column.num_chunks else column.combine_chunks() for column in columns))


def merge_change_sets(
    sets: Iterable[tuple[BytesLike, str, Sequence[KeyGroupRange]]],
    *,
    keep_deleted: bool,
    size_bytes_max: int,
    decoded_bytes_max: int,
) -> Iterator[tuple[bytes, int]]:
    """
    Merge change sets to the last change per key.

    Args:
        sets: In the order in which they apply: payload, name of its source, and the key groups to use from it.
        keep_deleted: Whether a key whose last change deleted it is kept as a deletion or left out.
        size_bytes_max: Approximate bytes of keys and values, uncompressed, in one result.
        decoded_bytes_max: Most bytes of all sets, uncompressed, with 40 more for each change; the merge takes up to
            three times as much memory.

    Yields:
        Payload and number of changes of each result, in ascending order of keys.

    Raises:
        CorruptDataError: A payload is not a change set; names its source.
        OverloadedError: The sets together exceed `decoded_bytes_max`; none was decoded.
    """
    parts, sets = [], list(sets)
    decoded_bytes = sum(_checked_size(payload, source) for payload, source, _ in sets)
    if decoded_bytes > decoded_bytes_max:
        raise OverloadedError(
            f"{len(sets)} change sets count {decoded_bytes} bytes uncompressed; at most {decoded_bytes_max} are merged"
        )
    for number, (payload, source, key_groups) in enumerate(sets):
        table = _decode(payload, source)
        for owned in key_groups:
            begin, end = _rows_of(table.column(0), owned)
            part = table.slice(begin, end - begin)
            parts.append(part.append_column("order", pa.array(np.full(part.num_rows, number, np.int32))))
    if not parts:
        return
    # 64-bit offsets: the change sets of one partition may exceed 2 GiB.
    large = pa.schema([("key", pa.large_binary()), ("value", pa.large_binary()), ("order", pa.int32())])
    merged = pa.concat_tables([part.cast(large) for part in parts]).combine_chunks()
    del parts
    merged = merged.take(pc.sort_indices(merged, [("key", "ascending"), ("order", "descending")])).combine_chunks()
    if merged.num_rows == 0:
        return
    keys = merged.column(0).chunk(0)
    is_last = np.ones(len(keys), np.bool_)
    is_last[1:] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    if not keep_deleted:
        is_last &= merged.column(1).chunk(0).is_valid().to_numpy(zero_copy_only=False)
    yield from _encode_in_pieces(merged.filter(pa.array(is_last)).combine_chunks(), size_bytes_max)


def _encode_in_pieces(table: pa.Table, size_bytes_max: int) -> Iterator[tuple[bytes, int]]:
    for begin, end in _parts(table.columns[:2], size_bytes_max):
        piece = table.slice(begin, end - begin).select([0, 1]).cast(SCHEMA).combine_chunks()
        yield encode_columns(ChangeColumns(*(column.chunk(0) for column in piece.columns))), end - begin


def _parts(columns: Sequence[pa.Array | pa.ChunkedArray], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where parts of about this size begin and end: long values may be neighbours, so their own sizes count."""
    if len(columns[0]):
        sizes = sum(pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64) for column in columns)
        part_of = (np.cumsum(sizes) - sizes) // size_bytes
        yield from pairwise([0, *(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(sizes)])


def _rows_of(keys: pa.Array | pa.ChunkedArray, key_groups: KeyGroupRange) -> tuple[int, int]:
    """Return begin and end of the rows of these key groups; they are adjacent, because the rows are sorted."""
    begin = bisect_left(range(len(keys)), struct.pack(">H", key_groups.first), key=lambda row: keys[row].as_py())
    end = struct.pack(">H", key_groups.last + 1)
    return begin, bisect_left(range(len(keys)), end, lo=begin, key=lambda row: keys[row].as_py())


def _encoded(columns: ChangeColumns, compression: Compression) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_WRITE_OPTIONS[compression]) as writer:
        writer.write_batch(pa.record_batch(list(columns), schema=SCHEMA))
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def _decoded_bytes_max(payload: BytesLike) -> int:
    return max(DECODED_BYTES_FLOOR, DECODED_RATIO_MAX * len(payload))


def _checked_size(payload: BytesLike, source: str) -> int:
    """
    Return what a payload counts in a merge, without decoding it: its decoded size, and more for rows and messages.

    Raises:
        CorruptDataError: A reader would refuse it; names `source`.
    """
    declared_bytes = beside_bytes = 0
    try:
        for head, body in _messages(memoryview(payload).cast("B")):
            size_bytes, rows = _declared(head, body)
            declared_bytes += size_bytes
            beside_bytes += _ROW_BYTES * rows + _MESSAGE_BYTES
        if declared_bytes > _decoded_bytes_max(payload):
            raise ValueError(f"its {len(payload)} bytes would become {declared_bytes}, more than a change set may")
    except (ValueError, struct.error, IndexError) as error:
        raise _unreadable(source, error) from error
    return max(declared_bytes, len(payload)) + beside_bytes


def _messages(stream: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield head and body of each message of an Arrow IPC stream. Arrow reads older forms, too, without sizes here."""
    begin = 0
    while begin + _PREFIX.size <= len(stream):
        mark, head_bytes = _PREFIX.unpack_from(stream, begin)
        if mark != _CONTINUATION or head_bytes < 0:
            raise ValueError("its frames are not those of Arrow's present form")
        if head_bytes == 0:
            return
        head = stream[begin + _PREFIX.size : begin + _PREFIX.size + head_bytes]
        root = _U32.unpack_from(head)[0]
        version_at = _field(head, root, 0)
        if not version_at or _U16.unpack_from(head, version_at)[0] != _V5:
            raise ValueError("its messages are not those of Arrow's present form")
        at = _field(head, root, 3)
        body_bytes = _I64.unpack_from(head, at)[0] if at else 0
        begin += _PREFIX.size + head_bytes
        if not 0 <= body_bytes <= len(stream) - begin:
            raise ValueError("it is truncated")
        yield head, stream[begin : begin + body_bytes]
        begin += body_bytes


def _declared(head: memoryview, body: memoryview) -> tuple[int, int]:
    """Return the decoded size of a message's compressed buffers, each begins with it, and the number of its rows."""
    message = _U32.unpack_from(head)[0]
    kind_at, batch_at = _field(head, message, 1), _field(head, message, 2)
    kind = head[kind_at] if kind_at else 0
    if kind == _SCHEMA_MESSAGE:
        return 0, 0
    if kind != _BATCH_MESSAGE:
        raise ValueError(f"it has a message of type {kind}")
    batch = batch_at + _U32.unpack_from(head, batch_at)[0]
    rows_at, buffers_at = _field(head, batch, 0), _field(head, batch, 2)
    rows = _I64.unpack_from(head, rows_at)[0] if rows_at else 0
    if rows < 0:
        raise ValueError(f"it has {rows} rows")
    if not _field(head, batch, 3) or not buffers_at:  # not compressed, so nothing is allocated
        return 0, rows
    vector = buffers_at + _U32.unpack_from(head, buffers_at)[0]
    total = 0
    for number in range(_U32.unpack_from(head, vector)[0]):
        offset, size = _BUFFER.unpack_from(head, vector + 4 + number * _BUFFER.size)
        if size:
            total += max(0, _I64.unpack_from(body, offset)[0])
    return total, rows


def _field(head: memoryview, table: int, number: int) -> int:
    """Return the offset of a field in a flatbuffer table, or 0 if it has none."""
    entries = table - _I32.unpack_from(head, table)[0]
    at = 4 + 2 * number
    offset = _U16.unpack_from(head, entries + at)[0] if at < _U16.unpack_from(head, entries)[0] else 0
    return table + offset if offset else 0


def _decode(payload: BytesLike, source: str) -> pa.Table:
    _checked_size(payload, source)
    try:
        reader = pa.ipc.open_stream(payload, options=_READ_OPTIONS)
        if reader.schema != SCHEMA:
            raise ValueError(f"it has the columns {reader.schema.names}")
        table = reader.read_all()
        # Arrow believes offsets: those of a hostile writer lead to other memory of this process.
        table.validate(full=True)
        if table.column(0).null_count:
            raise ValueError("a key is null")
    except (pa.ArrowException, ValueError, OSError) as error:
        raise _unreadable(source, error) from error
    return table


def _unreadable(source: str, error: Exception) -> CorruptDataError:
    return CorruptDataError(f"a change set in {source} cannot be read: {error}", object_key=source)
