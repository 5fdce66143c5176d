"""
Output as change sets: batches of rows under keys that keep their order.

A key is the slot's number as a key group (2 bytes), the epoch of the driver that logged it (8 bytes), and the number of
the batch within its writer (4 bytes), all big-endian. A value is one Arrow record batch as an IPC stream; the change
set around it is compressed. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import pyarrow as pa

from storage.change_set import ChangeColumns
from storage.errors import CorruptDataError

_KEY = struct.Struct(">HQI")
_BATCH_BYTES = 1 << 20


def change_sets(
    batches: Iterable[pa.RecordBatch], slot: int, epoch: int, size_bytes: int
) -> Iterator[tuple[dict[bytes, bytes | None], int]]:
    """
    Yield the changes that hold these rows, with the number of rows, in parts of about this size in bytes.

    The order of the parts, and of the keys in each, is the order of the rows.
    """
    changes: dict[bytes, bytes | None] = {}
    number = rows = size = 0
    for batch in batches:
        for piece in _pieces(batch):
            value = _encoded(piece)
            changes[_KEY.pack(slot, epoch, number)] = value
            number, rows, size = number + 1, rows + piece.num_rows, size + len(value)
            if size >= size_bytes:
                yield changes, rows
                changes, rows, size = {}, 0, 0
    if changes:
        yield changes, rows


def epoch_of(changes: ChangeColumns, source: str) -> int:
    """Return the epoch of the driver that logged a change set; `CorruptDataError` if it is not output."""
    try:
        return int(_KEY.unpack(changes.keys[0].as_py())[1])
    except (struct.error, IndexError, TypeError) as error:
        raise CorruptDataError(f"output in {source} cannot be read: {error}", object_key=source) from error


def record_batches(changes: ChangeColumns, source: str) -> Iterator[pa.RecordBatch]:
    """
    Yield the batches that changes hold, in order.

    Raises:
        CorruptDataError: The changes are not output; names `source`.
    """
    for value in changes.values:
        try:
            with pa.ipc.open_stream(value.as_buffer()) as reader:
                for batch in reader:
                    _check_offsets(batch)
                    yield batch
        except (pa.ArrowException, ValueError, OSError, AttributeError) as error:
            raise CorruptDataError(f"output in {source} cannot be read: {error}", object_key=source) from error


def _check_offsets(batch: pa.RecordBatch) -> None:
    """Raise `pa.ArrowInvalid` if values do not lie within a batch: Arrow would find them elsewhere in memory."""
    for column in batch.columns:
        kind = _in_bytes(column.type)
        (column if kind == column.type else column.view(kind)).validate(full=True)


def _in_bytes(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same layout that has bytes where this has texts: Spark's need not be UTF-8."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([field.with_type(_in_bytes(field.type)) for field in kind])
    if types.is_map(kind):
        key, item = (field.with_type(_in_bytes(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item)
    for is_kind, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_kind(kind):
            return make(kind.value_field.with_type(_in_bytes(kind.value_type)))
    return pa.binary() if types.is_string(kind) else pa.large_binary() if types.is_large_string(kind) else kind


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a large batch; rows of about the same size make pieces of about `_BATCH_BYTES`."""
    if batch.num_rows == 0:
        return
    rows = max(1, batch.num_rows * _BATCH_BYTES // max(batch.nbytes, 1))
    for begin in range(0, batch.num_rows, rows):
        yield batch.slice(begin, rows)


def _encoded(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())
