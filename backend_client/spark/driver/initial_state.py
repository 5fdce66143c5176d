"""
The initial state of an operator: rows of a batch DataFrame that its processor gets before the first input rows.

In the first batch of the operator, and only there, these rows are brought to the partitions of their keys together with
the input's, and lie before them. Should the batch fail, its next execution does the same on the same empty table; once
its checkpoint exists, the operator is part of the base and its initial state is never looked at again: exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame, GroupedData, Row
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField

from backend_client.spark.private.session import grouped_frame
from backend_client.spark.task.rows import row_factory
from storage.errors import InvalidInputError

if TYPE_CHECKING:
    from backend_client.spark.api.plan import Operator

_IS_INPUT = "__dstl_is_input"


@dataclass(frozen=True, slots=True)
class InitialState:
    """The rows, and by which of their columns they are grouped."""

    frame: DataFrame
    key_columns: tuple[str, ...]

    def joined(self, operator: Operator, rows: DataFrame) -> tuple[Operator, DataFrame]:
        """
        Return the input's rows with the initial rows, and the operator that places them: initial rows first in a key.

        Columns: those of the input, whether it is an input row, the key's, those of the initial state. Those of the
        input, and those of the initial state, are null where a row has none of them.
        """
        own, keys = self.frame.schema.fields, len(self.key_columns)
        key_names = tuple(f"__dstl_of_key_{at}" for at in range(keys))
        names = [*rows.columns, _IS_INPUT, *key_names, *(f"__dstl_initial_{at}" for at in range(len(own)))]
        theirs = rows.select(*_columns(rows), F.lit(True), *_columns(rows, operator.key_columns), *_nulls(own))
        mine = self.frame.select(
            *_nulls(rows.schema.fields), F.lit(False), *_columns(self.frame, self.key_columns), *_columns(self.frame)
        )
        both = theirs.toDF(*names).unionAll(mine.toDF(*names))
        return replace(operator, key_columns=key_names, input_schema=both.schema, order=(_IS_INPUT,)), both

    def rows(self, key_count: int, input_names: Sequence[str]) -> InitialRows:
        """Return what takes the rows of `joined` apart in the tasks."""
        return InitialRows(key_count, tuple(input_names), tuple(self.frame.columns))


@dataclass(frozen=True, slots=True)
class InitialRows:
    """Takes the rows that `InitialState.joined` brought together apart again, in the tasks."""

    key_count: int
    input_names: tuple[str, ...]
    initial_names: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The columns of the rows that are taken apart."""
        return [str(at) for at in range(self.key_count + 1 + len(self.input_names) + len(self.initial_names))]

    def splitter(self) -> Callable[[Iterable[Row], Callable[[Row], None]], Iterator[Row] | None]:
        """Return a function that gives a key's initial rows to another one, and returns its input rows or None."""
        marker = len(self.input_names)
        initial = marker + 1 + self.key_count
        new_input, new_initial = row_factory(self.input_names), row_factory(self.initial_names)

        def split(rows: Iterable[Row], take: Callable[[Row], None]) -> Iterator[Row] | None:
            left = iter(rows)
            for row in left:
                if row[marker]:
                    return (new_input(item[:marker]) for item in chain([row], left))
                take(new_initial(row[initial:]))
            return None

        return split


def initial_state_of(
    initial: Any, key_types: Sequence[DataType], grouping_columns: Callable[[Any], tuple[str, ...]]
) -> InitialState:
    """
    Check the `initialState` of a user.

    Raises:
        InvalidInputError: It is no grouped batch DataFrame, or its key is of other types than the input's.
    """
    if not isinstance(initial, GroupedData) or grouped_frame(initial).isStreaming:
        raise InvalidInputError(
            "initialState takes the rows of a batch DataFrame, grouped as the input is: spark.read….groupBy(columns)"
        )
    names = grouping_columns(initial)
    frame = grouped_frame(initial)
    types = ", ".join(frame.schema[name].dataType.simpleString() for name in names)
    wanted = ", ".join(kind.simpleString() for kind in key_types)
    if types != wanted:
        raise InvalidInputError(
            f"initialState is grouped by ({types}), the input by ({wanted}): group both by the same types in the same "
            "order"
        )
    return InitialState(frame, names)


def _columns(frame: DataFrame, names: Sequence[str] | None = None) -> list[Column]:
    return [frame["`" + name.replace("`", "``") + "`"] for name in (frame.columns if names is None else names)]


def _nulls(fields: Sequence[StructField]) -> list[Column]:
    return [F.lit(None).cast(field.dataType) for field in fields]
