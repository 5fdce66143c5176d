"""
The bytes of a change set: changed keys with their last value, sorted by key, as one compressed Arrow IPC stream.

Columns: ``key`` binary, ``value`` binary or null for a deleted key. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa

from storage.errors import CorruptDataError

SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def encode_change_set(changes: Mapping[bytes, bytes | None]) -> bytes:
    """Return the payload of a segment; `changes` has at least one key."""
    keys = sorted(changes)
    batch = pa.record_batch(
        [pa.array(keys, pa.binary()), pa.array([changes[key] for key in keys], pa.binary())], schema=SCHEMA
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    payload: bytes = sink.getvalue().to_pybytes()
    return payload


def decode_change_set(payload: bytes, source: str) -> Iterable[tuple[bytes, bytes | None]]:
    """
    Yield (key, value or None) in key order.

    Raises:
        CorruptDataError: The payload is no change set; names `source`.
    """
    try:
        table = pa.ipc.open_stream(payload).read_all()
        if table.schema != SCHEMA:
            raise ValueError(f"it has the columns {table.schema.names}")
        keys, values = table.column(0).to_pylist(), table.column(1).to_pylist()
    except (pa.ArrowException, ValueError, OSError) as error:
        raise CorruptDataError(f"a change set in {source} cannot be read: {error}", object_key=source) from error
    return zip(keys, values, strict=True)
