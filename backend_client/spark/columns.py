"""Columns: quoted names, those of a ``groupBy``, types with nulls, and text that is not compared by its bytes."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from backend_client.spark.private.session import grouped_frame, grouping_expressions, grouping_kind, setting
from storage.errors import InvalidInputError


def quoted(name: str) -> str:
    """Return a column's name quoted for SQL."""
    return "`" + name.replace("`", "``") + "`"


def grouping_columns(grouped: Any) -> tuple[str, ...]:
    """
    Return the names of the columns of a ``groupBy``.

    Raises:
        InvalidInputError: It groups by an expression that is not a column, or by nothing, or in another way.
    """
    kind = grouping_kind(grouped)
    if kind != "GroupBy":
        raise InvalidInputError(
            f"a stateful operator keeps state per key and takes the result of groupBy(columns), not of a {kind}: rows "
            "would count for their key only, without subtotals or pivoted columns"
        )
    names = []
    frame = grouped_frame(grouped)
    for text, is_column in grouping_expressions(grouped):
        name = _column_called(text, frame) if is_column else None
        if name is None or frame.columns.count(name) > 1:
            found = "none" if name is None else "more than one"
            raise InvalidInputError(
                f"groupBy of a stateful operator takes columns; {text!r} is {found} of {', '.join(frame.columns)}. "
                "Add it with withColumn first"
            )
        names.append(name)
    if not names:
        raise InvalidInputError("groupBy needs at least one column: state is kept per key")
    return tuple(names)


def _column_called(text: str, frame: DataFrame) -> str | None:
    """Return the column that Spark resolves a name to; case-insensitive by default."""
    if text in frame.columns or setting(frame.sparkSession, "spark.sql.caseSensitive", "false") == "true":
        return text if text in frame.columns else None
    return next((name for name in frame.columns if name.lower() == text.lower()), None)


def nullable(schema: StructType) -> StructType:
    """Return a schema with nulls allowed at every depth, as Spark has the output of functions in Python."""
    return StructType([StructField(of.name, _nullable(of.dataType), True, of.metadata) for of in schema.fields])


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StructType):
        return nullable(kind)
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind


def check_bytewise(schema: StructType, why: str) -> None:
    """
    Check that all text of a schema is compared by its bytes.

    Args:
        schema: The columns.
        why: Why another collation would give wrong results, for the error.

    Raises:
        InvalidInputError: A column has or contains text of another collation; names it.
    """
    for field in schema.fields:
        if not _is_bytewise(field.dataType):
            raise InvalidInputError(
                f"column {field.name!r} of type {field.dataType.simpleString()} has a collation other than "
                f"UTF8_BINARY. {why}: cast it to string, and for a comparison without case add lower({field.name})"
            )


def _is_bytewise(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return all(_is_bytewise(field.dataType) for field in kind.fields)
    if isinstance(kind, MapType):
        return _is_bytewise(kind.keyType) and _is_bytewise(kind.valueType)
    if isinstance(kind, ArrayType):
        return _is_bytewise(kind.elementType)
    return not isinstance(kind, StringType) or kind.isUTF8BinaryCollation()
