"""Writes the Parquet files of a sink on this host, before it publishes them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from backend_client.sinks.conversions import in_utc, keeps_values
from backend_client.sinks.temporary_files import room_for_records
from storage.errors import UnavailableError

MARKER = b"dstl.marker"
"""The field of a file's metadata that has the marker."""
_ROW_GROUP_BYTES = 64 << 20


class Written(NamedTuple):
    """A file, and how many rows it has."""

    file: IO[bytes]
    rows: int


def written_records(
    records: Iterable[pa.RecordBatch], marker: str, compression: str, files: ExitStack
) -> Written | None:
    """
    Write records into a temporary file, one row group in memory at a time; return None if there are none.

    Records from before a change of the query may have other columns: then the file has the columns of all.
    """
    parts, rows = [], 0
    filled = (_stored(batch) for batch in records if batch.num_rows)
    for schema, batches in groupby(filled, lambda batch: batch.schema):
        file = temporary(files)
        rows += write(file, batches, schema, marker, compression)
        parts.append(file)
    if len(parts) <= 1:
        return Written(parts[0], rows) if parts else None
    sources = [pq.ParquetFile(part) for part in parts]
    merged = temporary(files)
    try:
        schemas = [source.schema_arrow for source in sources]
        # Rows from before the change lack what is new, and those from after it what is gone.
        schema = pa.schema(
            [column.with_nullable(True) for column in pa.unify_schemas(schemas, promote_options="permissive")]
        )
        _check_types(schemas, schema)
        write(merged, (batch for source in sources for batch in source.iter_batches()), schema, marker, compression)
    except pa.ArrowException as error:
        raise UnavailableError(
            f"unpublished output of before and after a change of the query does not fit into one file: {error}; "
            "rewind the job to the last checkpoint before the change, or give the output up"
        ) from error
    return Written(merged, rows)


def _stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with times in UTC, as they are stored: another session's time zone is no change of the columns."""
    schema = pa.schema(
        [pa.field(column.name, in_utc(column.type), column.nullable, column.metadata) for column in batch.schema],
        batch.schema.metadata,
    )
    return batch if schema == batch.schema else batch.cast(schema)


def _check_types(schemas: Sequence[pa.Schema], merged: pa.Schema) -> None:
    """Raise `pa.ArrowInvalid` if values would be rounded in the merged columns, or could not be read by Spark."""
    if twice := list(same_names(list(merged))):
        raise pa.ArrowInvalid(f"columns {', '.join(twice)} are the same to Spark, which ignores case")
    for column in merged:
        for schema in schemas:
            given = None if column.name not in schema.names else schema.field(column.name).type
            if given is not None and not _fits(given, column.type):
                raise pa.ArrowInvalid(f"column {column.name} is {given} and {column.type}")


def same_names(fields: Sequence[pa.Field], within: str = "") -> Iterator[str]:
    """Yield the fields, at any depth, beside which there is one of the same name: Spark opens no folder with such."""
    found = Counter(column.name.lower() for column in fields)
    for column in fields:
        name, given = f"{within}{column.name}", column.type
        if found[column.name.lower()] > 1:
            yield name
        yield from same_names([given.field(number) for number in range(given.num_fields)], f"{name}.")


def _fits(given: pa.DataType, merged: pa.DataType) -> bool:
    """Return whether a column keeps its values; fields that a struct lacks are null."""
    if pa.types.is_struct(given) and pa.types.is_struct(merged):
        return all(_fits(of.type, merged.field(of.name).type) for of in given)
    return keeps_values(given, merged)


def write(file: IO[bytes], batches: Iterable[pa.RecordBatch], schema: pa.Schema, marker: str, compression: str) -> int:
    """Write a Parquet file; return its number of rows."""
    schema = schema.with_metadata({**(schema.metadata or {}), MARKER: marker.encode()})
    rows = 0
    leaves = [leaf for column in schema for leaf in _leaves(column.name, column.type)]
    # The library knows leaves by paths alone: a column whose name has dots may have that of a field.
    floats = {path for path, kind in leaves if pa.types.is_floating(kind)}
    found = [path for path, _ in leaves if path not in floats]
    exact = [path for column in schema for path in _with_statistics(column.name, column.type) if path not in floats]
    writer = pq.ParquetWriter(file, schema, compression=compression, write_statistics=exact, use_dictionary=found)
    try:
        for group in _groups(batches):
            tables = [schema.empty_table(), *(pa.Table.from_batches([batch]) for batch in group)]
            table = pa.concat_tables(tables, promote_options="permissive").cast(schema)
            with room_for_records():
                writer.write_table(table, row_group_size=table.num_rows)
            rows += table.num_rows
        with room_for_records():
            writer.close()
            file.flush()
    except BaseException:
        with suppress(OSError, pa.ArrowException):
            writer.close()
        raise
    return rows


def _with_statistics(name: str, given: pa.DataType) -> Iterator[str]:
    """
    Yield the paths of a column that get statistics, unless they are those of floats.

    The library leaves NaN out of the greatest value. Spark takes NaN for the greatest number, and would miss its rows.
    """
    if pa.types.is_struct(given):
        for field in given:
            yield from _with_statistics(f"{name}.{field.name}", field.type)
    else:
        yield name


def _leaves(name: str, given: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """
    Yield the paths and types of a column's leaves; those of floats get no dictionary.

    Spark looks a number up in it before it reads rows, and does not find -0.0 as 0, which it equals.
    """
    if pa.types.is_struct(given):
        inner = [(f"{name}.{field.name}", field.type) for field in given]
    elif pa.types.is_list(given) or pa.types.is_large_list(given):
        inner = [(f"{name}.list.element", given.value_type)]
    elif pa.types.is_map(given):
        inner = [(f"{name}.key_value.key", given.key_type), (f"{name}.key_value.value", given.item_type)]
    else:
        yield name, given
        return
    for path, kind in inner:
        yield from _leaves(path, kind)


def temporary(files: ExitStack) -> IO[bytes]:
    """Return a file that is gone when the stack is closed."""
    return files.enter_context(tempfile.TemporaryFile())


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
