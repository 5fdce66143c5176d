"""
An operator's initial state: rows of a batch DataFrame that its processor gets before the first input rows.

In the operator's first batch, and only there, these rows are sent to the partitions of their keys together with the
input rows, and sort before them. If the batch fails, its next execution does the same on the same empty table. Once its
checkpoint exists, the operator is part of the base and its initial state is never read again: exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField

from backend_client.spark.columns import grouping_columns, quoted
from backend_client.spark.private.session import grouped_frame
from backend_client.spark.query import InitialState, Operator
from storage.errors import InvalidInputError

_IS_INPUT = "__dstl_is_input"


def joined(initial: InitialState, operator: Operator, rows: DataFrame) -> tuple[Operator, DataFrame]:
    """
    Return the operator for the union of initial and input rows, initial rows first within a key, and that union.

    Columns: the input's, a flag for input rows, the key's, the initial state's. An initial row has nulls in the input's
    columns, an input row in those of the initial state.
    """
    own, keys = initial.frame.schema.fields, len(initial.key_columns)
    key_names = tuple(f"__dstl_of_key_{at}" for at in range(keys))
    names = [*rows.columns, _IS_INPUT, *key_names, *(f"__dstl_initial_{at}" for at in range(len(own)))]
    # A key may be the event time; only one column may carry the watermark.
    key = [column.alias("key", metadata={}) for column in _columns(rows, operator.key_columns)]
    theirs = rows.select(*_columns(rows), F.lit(True), *key, *_nulls(own))
    mine = initial.frame.select(
        *_nulls(rows.schema.fields),
        F.lit(False),
        *_columns(initial.frame, initial.key_columns),
        *_columns(initial.frame),
    )
    both = theirs.toDF(*names).unionAll(mine.toDF(*names))
    return replace(operator, key_columns=key_names, input_schema=both.schema, order=(_IS_INPUT,)), both


def initial_state_of(initial: Any, key_types: Sequence[DataType]) -> InitialState:
    """
    Check a user's `initialState`.

    Raises:
        InvalidInputError: It is not a grouped batch DataFrame, or its key types differ from the input's.
    """
    if not isinstance(initial, GroupedData) or grouped_frame(initial).isStreaming:
        raise InvalidInputError(
            "initialState must be a batch DataFrame, grouped by the same key as the input: spark.read….groupBy(columns)"
        )
    names = grouping_columns(initial)
    frame = grouped_frame(initial)
    types = ", ".join(frame.schema[name].dataType.simpleString() for name in names)
    wanted = ", ".join(kind.simpleString() for kind in key_types)
    if types != wanted:
        raise InvalidInputError(
            f"initialState is grouped by types ({types}), the input by ({wanted}): group both by columns of the same "
            "types in the same order"
        )
    return InitialState(frame, names)


def _columns(frame: DataFrame, names: Sequence[str] | None = None) -> list[Column]:
    return [frame[quoted(name)] for name in (frame.columns if names is None else names)]


def _nulls(fields: Sequence[StructField]) -> list[Column]:
    return [F.lit(None).cast(field.dataType) for field in fields]
