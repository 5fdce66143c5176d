"""Records in a temporary file of this host, from which the library reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import pyarrow as pa

from backend_client.sinks.temporary_files import room_for_records

_ROW_GROUP_BYTES = 64 << 20
"""A file is written one row group at a time, which the library holds in memory."""


def spool(file: IO[bytes], records: Iterable[pa.RecordBatch], schema: pa.Schema) -> tuple[int, int]:
    """Write records with these columns into a file as an IPC stream; return the number of rows, and bytes."""
    rows = size_bytes = 0
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(file, schema, options=options) as writer:
        for batch in records:
            with room_for_records():
                writer.write_batch(batch)
            rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
    with room_for_records():
        file.flush()
    file.seek(0)
    return rows, size_bytes


def rows_per_group(rows: int, size_bytes: int) -> int:
    """Return how many rows of such records a row group of the table's file has."""
    return max(1, rows * _ROW_GROUP_BYTES // max(size_bytes, 1))
