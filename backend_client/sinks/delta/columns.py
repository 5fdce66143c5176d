"""Columns of output and of a Delta table: what fits, what is missing, and batches with the table's columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema

from backend_client.sinks.conversions import in_utc, keeps_values
from backend_client.sinks.delta.constraints import foreign_constraints
from backend_client.sinks.delta.statistics import check_statistics
from storage.errors import InvalidInputError, UnavailableError

_COMPUTED = ("delta.generationExpression", "delta.identity.start")
"""In a column's metadata: the writer computes its values."""
_MAPPING = "delta.columnMapping.mode"


def column_types(columns: pa.Schema, partition_by: Sequence[str]) -> pa.Schema:
    """
    Return output columns with the types that Delta has for them.

    Raises:
        InvalidInputError: It has none, or two names differ only in case; or a partition column is missing or all are.
    """
    found = pa.schema([pa.field(column.name, in_utc(column.type)) for column in columns])
    for column in found:
        try:
            Schema.from_arrow(pa.schema([column]))
        except Exception as error:
            # The library raises exactly this class, with a trace in its text.
            raise InvalidInputError(
                f"column {column.name} is {columns.field(column.name).type}, for which Delta has no type: cast it, or "
                "leave it out"
            ) from error
        if _holds_nothing(column.type):
            raise InvalidInputError(
                f"column {column.name} is {columns.field(column.name).type}: something in it has no type, or is a "
                "struct without fields, which cannot be stored. Cast it, or leave it out"
            )
    names = Counter(name.lower() for name in found.names)
    if twice := [name for name in found.names if names[name.lower()] > 1]:
        raise InvalidInputError(f"columns {', '.join(twice)} are the same to Delta, which ignores case: rename one")
    if missing := [name for name in partition_by if name not in found.names]:
        raise InvalidInputError(f"the result has no column {', '.join(missing)}; it has {', '.join(found.names)}")
    if len({*partition_by}) == len(found):
        raise InvalidInputError("partition_by names all columns: a file needs one that is not in its path")
    _check_partitions(found, partition_by)
    return found


def check_table(
    table: DeltaTable, path: str, wanted: pa.Schema, partition_by: Sequence[str], *, merge: bool
) -> list[Field]:
    """
    Check that a table takes output; return the columns that it lacks, which are none unless they may be merged.

    Raises:
        InvalidInputError: It does not; says what the table has and what the result has.
    """
    mapping = table.metadata().configuration.get(_MAPPING) or "none"
    if mapping != "none":
        raise InvalidInputError(
            f"table {path} has {_MAPPING} = {mapping}, with which nothing can be published: use a table without column "
            "mapping"
        )
    partitions = list(table.metadata().partition_columns)
    if partition_by and [*partition_by] != partitions:
        raise InvalidInputError(
            f"table {path} is partitioned by {', '.join(partitions) or 'nothing'}, not by {', '.join(partition_by)}"
        )
    if foreign := _in_foreign_sql(table):
        raise InvalidInputError(f"table {path} {foreign}")
    there = {column.name: column for column in pa.schema(table.schema().to_arrow())}
    _check_partitions(wanted, [name for name in partitions if name in wanted.names])
    for column in wanted:
        if column.name in there and in_utc(there[column.name].type) != column.type:
            raise InvalidInputError(
                f"column {column.name} of table {path} is {there[column.name].type}, of the result {column.type}: "
                "cast it in the query"
            )
    if required := [name for name, column in there.items() if not column.nullable and name not in wanted.names]:
        raise InvalidInputError(f"table {path} requires column {', '.join(required)}, which the result does not have")
    lacking = [column for column in wanted if column.name not in there]
    known = {name.lower(): name for name in there}
    if twice := [column.name for column in lacking if column.name.lower() in known]:
        raise InvalidInputError(
            f"table {path} has column {known[twice[0].lower()]}, the result {twice[0]}, which is the same to Delta: "
            "rename it in the query"
        )
    if lacking and not merge:
        raise InvalidInputError(
            f"table {path} has no column {', '.join(column.name for column in lacking)}; it has {', '.join(there)}: "
            "add it, or set merge_schema"
        )
    columns = [*there.values(), *lacking]
    check_statistics(table, path, columns, [column.name for column in columns], partitions)
    return list(Schema.from_arrow(pa.schema(lacking)).fields) if lacking else []


def stored_columns(table: DeltaTable, path: str) -> pa.Schema:
    """
    Return the columns that are written to a table; null is found by the table.

    Raises:
        UnavailableError: The table was replaced by one that computes columns, or has a constraint of another SQL now.
    """
    if foreign := _in_foreign_sql(table):
        raise UnavailableError(f"table {path} {foreign}")
    columns = pa.schema(table.schema().to_arrow())
    return pa.schema([pa.field(column.name, column.type) for column in columns])


def check_readable(table: DeltaTable, path: str, columns: pa.Schema, written: Collection[str]) -> None:
    """
    Raise `UnavailableError` if others have altered a table so that readers would miss values.

    Args:
        table: The table.
        path: Its path, for the message.
        columns: All its columns.
        written: Names of those whose values are written.
    """
    partitions = table.metadata().partition_columns
    try:
        _check_partitions(columns, [name for name in partitions if name in written])
        check_statistics(table, path, list(columns), written, partitions)
    except InvalidInputError as error:
        raise UnavailableError(f"table {path} was altered: {error}") from error


def conformed(batch: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.RecordBatch:
    """
    Return a batch with a table's columns; those that it lacks are null.

    Raises:
        UnavailableError: The table has no such column, or cannot hold a value: it was changed, or the query was.
    """
    if lacking := [name for name in batch.schema.names if name not in schema.names]:
        raise UnavailableError(f"table {path} no longer has column {', '.join(lacking)}: add it to the table again")
    arrays = []
    for column in schema:
        if column.name not in batch.schema.names:
            arrays.append(pa.nulls(batch.num_rows, column.type))
            continue
        array = batch.column(column.name)
        if not keeps_values(array.type, column.type):
            raise UnavailableError(
                f"column {column.name} of table {path} is {column.type}, and unpublished output has {array.type}, "
                "whose values would change: the table or the query was altered. Let the table's column have that type "
                "until the output is published"
            )
        try:
            arrays.append(array.cast(column.type))
        except pa.ArrowException as error:
            raise UnavailableError(
                f"column {column.name} of table {path} is {column.type} and cannot hold a value of {array.type}: "
                f"change the table's column: {error}"
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _check_partitions(columns: pa.Schema, partition_by: Sequence[str]) -> None:
    """
    Raise `InvalidInputError` for partition columns whose values readers would not understand.

    The library writes -1.05 as ``-1.-5``: no reader could open the table any more. For bytes, readers see the escapes.
    It writes timestamps in UTC without saying so; Spark then reads them in its session's time zone.
    """
    for name in partition_by:
        given = columns.field(name).type
        has_fraction = pa.types.is_decimal(given) and given.scale > 0
        is_moment = pa.types.is_timestamp(given) and given.tz is not None
        if has_fraction or is_moment or pa.types.is_binary(given):
            raise InvalidInputError(
                f"column {name} is {given}, whose values readers could not read from the names of partitions: "
                f"partition by another column, or cast it to a {'date' if is_moment else 'string'}"
            )


def _holds_nothing(given: pa.DataType) -> bool:
    """Return whether a type, or one within it, has no values but null, or is a struct without fields."""
    within = [given.field(number).type for number in range(given.num_fields)]
    return pa.types.is_null(given) or (pa.types.is_struct(given) and not within) or any(map(_holds_nothing, within))


def _computed(table: DeltaTable) -> list[str]:
    """
    Return the columns of which a writer computes the values.

    The library takes Spark's expressions for those of another SQL: 7 / 2 is 3, ``date_format(t, 'yyyy-MM')`` the format
    itself. Readers that filter by such a column, also one by which Spark chooses partitions, would miss rows.
    """
    return [column.name for column in table.schema().fields if any(name in column.metadata for name in _COMPUTED)]


def _in_foreign_sql(table: DeltaTable) -> str:
    """Return what a table has that means something else to the library than to Spark, and what to do; "" if nothing."""
    if computed := _computed(table):
        return (
            f"computes column {', '.join(computed)} as only Spark can: use a table in which that is a plain column, "
            "and compute it in the query"
        )
    if constraints := foreign_constraints(table, pa.schema(table.schema().to_arrow())):
        return (
            f"has a constraint that only Spark can check: {'; '.join(constraints)[:300]}. Drop it and filter in the "
            "query, or write it as comparisons of columns, named as in the table, with values of their types"
        )
    return ""
