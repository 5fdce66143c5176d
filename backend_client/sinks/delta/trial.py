"""
Writes what a table checks of records to a small table of this host first.

The library checks each part of records as it writes it. Of many records, files of the first parts are then in the
table's folder; if a row is refused, they stay there until `vacuum`, again with every try, as long as the cause lasts.
"""

from __future__ import annotations

import tempfile
from typing import IO, cast

import pyarrow as pa
from deltalake import DeltaTable, Schema, WriterProperties, write_deltalake

from backend_client.sinks.delta.constraints import constraints_of, texts_of_constraints

_LEFT_FROM_BYTES = 8 << 20
"""Of fewer bytes the library sends nothing before it has seen the last row."""


def check_rows(table: DeltaTable, file: IO[bytes], size_bytes: int) -> None:
    """
    Check that a table refuses none of many records.

    Args:
        table: The table.
        file: The records, as an IPC stream with the table's columns; read from and set back to its start.
        size_bytes: Their size in memory.

    Raises:
        DeltaError: It refuses one; nothing is written to it.
    """
    if size_bytes < _LEFT_FROM_BYTES:
        return
    texts = texts_of_constraints(table)
    checked = [each for each in table.schema().fields if not each.nullable or any(each.name in text for text in texts)]
    if not checked:
        return
    names = [column.name for column in checked]
    reader = pa.ipc.open_stream(file)
    columns = pa.schema([reader.schema.field(name) for name in names])
    with tempfile.TemporaryDirectory() as folder:
        trial = DeltaTable.create(folder, Schema(checked))
        for number, text in enumerate(constraints_of(table)):
            trial.alter.add_constraint({f"c{number}": text})
        write_deltalake(
            trial,
            cast("pa.RecordBatchReader", pa.RecordBatchReader.from_batches(columns, (b.select(names) for b in reader))),
            mode="append",
            schema_mode="merge",
            writer_properties=WriterProperties(compression="SNAPPY", statistics_truncate_length=64),
        )
    file.seek(0)
