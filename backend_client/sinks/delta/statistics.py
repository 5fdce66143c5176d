"""
Columns of which a table has no statistics, because readers would miss rows by them. No I/O.

Readers skip files by the least and the greatest value of a column. The library writes both as JSON: decimals are
rounded, infinities become null, with which no comparison holds, and NaN is left out, which Spark takes for the greatest
number. A single file cannot omit them, because some readers take missing values for null. So the table's properties
turn them off, and the files of such a table have no statistics of floats either.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, DeltaTable

from storage.errors import InvalidInputError, UnavailableError

_STATISTICS = "delta.dataSkippingStatsColumns"
_STATISTICS_NUMBER = "delta.dataSkippingNumIndexedCols"
_EXACT_DIGITS = 15
_OTHERS = ColumnProperties(dictionary_enabled=True, statistics_enabled="PAGE")
_FLOATS = {
    True: ColumnProperties(dictionary_enabled=False, statistics_enabled="PAGE"),
    False: ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE"),
}
"""How floats are written, by whether their table has statistics of them."""
_PLAIN = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def statistics_of(columns: Iterable[pa.Field], partitions: Sequence[str]) -> dict[str, str]:
    """Return the properties by which a table has no inexact statistics; none if it needs none."""
    columns = [column for column in columns if column.name not in partitions]
    inexact = {column.name for column in columns if _is_rounded(column.type) or _has_floats(column.type)}
    if not inexact:
        return {}
    if _has_floats_in_structs(columns):
        inexact |= {column.name for column in columns if pa.types.is_struct(column.type)}
    exact = [column.name for column in columns if column.name not in inexact and _PLAIN.fullmatch(column.name)]
    return {_STATISTICS: ",".join(exact)} if exact else {_STATISTICS_NUMBER: "0"}


def check_statistics(
    table: DeltaTable, path: str, columns: Sequence[pa.Field], written: Container[str], partitions: Sequence[str]
) -> None:
    """
    Check that readers find rows by statistics of decimals with many digits.

    Args:
        table: The table.
        path: Its path, for the message.
        columns: All its columns.
        written: Names of those that are written.
        partitions: Names of those by which it is partitioned.

    Raises:
        InvalidInputError: They would miss some; says how the column gets no statistics.
    """
    unsafe = [column.name for column in columns if _is_rounded(column.type) and column.name not in partitions]
    wrong = [name for name in unsafe if name in written]
    if wrong := _with_statistics(wrong, table.metadata().configuration):
        raise InvalidInputError(
            f"column {', '.join(wrong)} of table {path} has more than {_EXACT_DIGITS} digits: statistics of it are "
            f"written as floats, and readers that filter by it would miss rows. {_advice(columns, partitions)}"
        )


def check_values(table: DeltaTable, path: str, batch: pa.RecordBatch) -> None:
    """
    Check that readers find the values of a batch by a table's statistics.

    Raises:
        UnavailableError: A column with statistics has NaN or an infinity; says how it gets none.
    """
    metadata = table.metadata()
    partitions = metadata.partition_columns
    names = [name for name, column in zip(batch.schema.names, batch.columns, strict=True) if _is_beyond(column)]
    if names := _with_statistics([name for name in names if name not in partitions], metadata.configuration):
        raise UnavailableError(
            f"column {', '.join(names)} of table {path} has statistics, and now NaN or an infinity: readers that "
            f"filter by it would miss rows. {_advice(pa.schema(table.schema().to_arrow()), partitions)}"
        )


def without_floats(table: DeltaTable, columns: pa.Schema) -> dict[str, Any]:
    """
    Return the writer's options by which a file has no statistics of the floats of which its table has none.

    Nor a dictionary of floats: Spark looks 0 up in it before it reads rows, and does not find -0.0, which it equals.
    """
    properties = table.metadata().configuration
    nested = [column.name for column in columns if pa.types.is_struct(column.type)]
    floats = [column.name for column in columns if _has_floats(column.type)]
    options = {name: _FLOATS[bool(_with_statistics([name], properties))] for name in floats}
    if not _has_floats_in_structs(columns):
        return {"column_properties": options} if options else {}
    # The library cannot name columns within structs.
    of_nested = _FLOATS[bool(_with_statistics(nested, properties))]
    others = {name: _OTHERS for name in columns.names if name not in (*floats, *nested)}
    return {"default_column_properties": of_nested, "column_properties": {**options, **others}}


def _advice(columns: Iterable[pa.Field], partitions: Sequence[str]) -> str:
    wanted = statistics_of(columns, partitions)
    return f"Leave it out of them: DeltaTable(…).alter.set_table_properties({wanted})"


def _with_statistics(names: Sequence[str], properties: Mapping[str, str | None]) -> list[str]:
    """Return the columns of which a table with these properties has statistics."""
    if properties.get(_STATISTICS_NUMBER) == "0":
        return []
    if _STATISTICS not in properties:
        return list(names)
    listed = [name.strip(" `").partition(".")[0] for name in (properties[_STATISTICS] or "").split(",")]
    return [name for name in names if name in listed]


def _is_rounded(given: pa.DataType) -> bool:
    if pa.types.is_struct(given):
        return any(_is_rounded(column.type) for column in given)
    return bool(pa.types.is_decimal(given) and given.precision > _EXACT_DIGITS)


def _has_floats(given: pa.DataType) -> bool:
    if pa.types.is_struct(given):
        return any(_has_floats(column.type) for column in given)
    return bool(pa.types.is_floating(given))


def _has_floats_in_structs(columns: Iterable[pa.Field]) -> bool:
    return any(pa.types.is_struct(column.type) and _has_floats(column.type) for column in columns)


def _is_beyond(array: pa.Array) -> bool:
    """Return whether an array, or one within its structs, has NaN or an infinity."""
    if pa.types.is_struct(array.type):
        return any(map(_is_beyond, array.flatten()))
    return pa.types.is_floating(array.type) and pc.all(pc.is_finite(array)).as_py() is False
