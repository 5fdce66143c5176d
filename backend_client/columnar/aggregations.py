"""
Ready-made aggregations: count, sum, minimum, maximum, mean, top k, last value.

Each keeps a few state columns per key and updates them for all keys of a batch at once. Nulls are ignored, as in Spark.
No I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar import reductions
from backend_client.columnar.reductions import Groups
from backend_client.columnar.values import Bools, valid
from backend_client.option_checks import check_column, check_whole
from storage.errors import InvalidInputError

_TOP_MAX = 1000


@dataclass(frozen=True)
class Aggregation(ABC):
    """
    An aggregation of one column.

    Args:
        column: The input column.
        name: Name of the output column; Spark's name for it by default.
    """

    column: str
    name: str | None = None

    meaning: ClassVar[str] = ""
    """What the state's columns are. Stored with the job: a start with another one is refused; "" fits any."""

    def __post_init__(self) -> None:
        what = type(self).__name__
        check_column(what, self.column)
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidInputError(
                f"{what}({self.column!r}): the name of the output column must be text, not {self.name!r}; give other "
                "arguments by their names"
            )

    def alias(self, name: str) -> Self:
        """Return the aggregation with another name of its output column."""
        return replace(self, name=name)

    @property
    def output_name(self) -> str:
        """The name of the output column."""
        return self.name or f"{type(self).__name__.lower()}({self.column})"

    def _kind(self, rows: pa.Schema) -> pa.DataType:
        found = rows.names.count(self.column)
        if found != 1:
            raise InvalidInputError(
                f"{self.output_name}: the input has {found or 'no'} column{'s' * (found > 1)} {self.column!r}"
            )
        return rows.field(self.column).type

    @abstractmethod
    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """
        Return the types of the state's columns.

        Raises:
            InvalidInputError: The column is missing, or its type does not support this aggregation.
        """

    def result_type(self, rows: pa.Schema) -> pa.DataType:
        """Return the type of the result."""
        return self.state_types(rows)[0]

    @abstractmethod
    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """
        Return the state with these rows.

        Args:
            rows: The rows of all groups.
            groups: The rows of each key.
            old: The state's columns, one row per key.
            known: Which keys have state.
        """

    def result(self, state: Sequence[pa.Array]) -> pa.Array:
        """Return the results, one per key."""
        return state[0]


class Combinable(ABC):
    """An aggregation whose states can be combined, so that rows are condensed before they go into several windows."""

    @abstractmethod
    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Return the state of each group of states; those that are null count for nothing."""

    def added(self, old: Sequence[pa.Array], new: list[pa.Array], known: Bools) -> list[pa.Array]:
        """Return the state of each key, of what it was before, if it is known, and that of its new rows."""
        if not known.any():
            return new
        both = [reductions.beside(before, after) for before, after in zip(old, new, strict=True)]
        return self.combine(both, reductions.pairs(len(known)))


def combines(aggregation: Aggregation) -> bool:
    """Return whether states of an aggregation can be combined; a subclass that only overrides `update` takes rows."""
    own = next(part for part in map(vars, type(aggregation).__mro__) if "update" in part or "combine" in part)
    return "combine" in own


@dataclass(frozen=True)
class Count(Aggregation, Combinable):
    """Number of rows, or of values of a column."""

    column: str = "1"
    meaning = "count"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return one integer column."""
        if self.column != "1":
            self._kind(rows)
        return [pa.int64()]

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Add."""
        values = rows.column(self.column) if self.column != "1" else None
        before = pc.fill_null(old[0], 0).to_numpy(zero_copy_only=False)
        return [pa.array(before + reductions.count(values, groups))]

    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Add."""
        return [pc.fill_null(reductions.total(states[0], groups, pa.int64()), 0)]


@dataclass(frozen=True)
class Sum(Aggregation, Combinable):
    """Sum of numbers: long for integers, double for floats, decimal for decimals; null without values."""

    meaning = "sum"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return the sum's type."""
        return [reductions.sum_type(self._kind(rows))]

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Add."""
        return self.added(old, [reductions.total(rows.column(self.column), groups, old[0].type)], known)

    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Add."""
        return [reductions.total(states[0], groups, states[0].type)]


@dataclass(frozen=True)
class _Extreme(Aggregation, Combinable):
    _greatest = False

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return the column's type."""
        kind = self._kind(rows)
        if pa.types.is_nested(kind):
            raise InvalidInputError(
                f"{self.output_name}: values of type {kind} cannot be compared; use a column of a simple type"
            )
        return [kind]

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Compare."""
        return self.added(old, self.combine([rows.column(self.column)], groups), known)

    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Compare."""
        return [reductions.extreme(states[0], groups, greatest=self._greatest)]


@dataclass(frozen=True)
class Min(_Extreme):
    """Minimum; null without values. NaN is greater than all other numbers."""

    meaning = "minimum"


@dataclass(frozen=True)
class Max(_Extreme):
    """Maximum; null without values. NaN is greater than all other numbers."""

    meaning = "maximum"
    _greatest = True


@dataclass(frozen=True)
class Mean(Aggregation, Combinable):
    """Mean of numbers as a double; null without values."""

    meaning = "mean"

    @property
    def output_name(self) -> str:
        """The name of the output column; Spark's by default."""
        return self.name or f"avg({self.column})"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return sum and count."""
        reductions.sum_type(self._kind(rows))
        return [pa.float64(), pa.int64()]

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Add."""
        values = reductions.as_doubles(rows.column(self.column))
        sums = pc.fill_null(reductions.total(values, groups, pa.float64()), 0.0)
        number = pa.array(reductions.count(values, groups))
        return [pc.add(pc.fill_null(old[0], 0.0), sums), pc.add(pc.fill_null(old[1], 0), number)]

    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Add."""
        sums, numbers = (reductions.total(column, groups, column.type) for column in states)
        return [pc.fill_null(sums, 0.0), pc.fill_null(numbers, 0)]

    def result(self, state: Sequence[pa.Array]) -> pa.Array:
        """Divide."""
        sums, numbers = (column.to_numpy(zero_copy_only=False) for column in state)
        empty = numbers == 0
        return pa.array(sums / np.where(empty, 1, numbers), mask=empty)


@dataclass(frozen=True)
class TopK(Aggregation):
    """
    The greatest values in descending order, as a list.

    Args:
        limit: Length of the list, 1 to 1000.
    """

    limit: int = 10
    meaning = "top"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return one column per value."""
        check_whole(f"{self.output_name}: limit", self.limit, 1, _TOP_MAX)
        return Min(self.column, self.output_name).state_types(rows) * self.limit

    def result_type(self, rows: pa.Schema) -> pa.DataType:
        """Return a list."""
        return pa.list_(self._kind(rows))

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Choose among the old and the new values."""
        number = len(groups.starts)
        new = reductions.leading(rows.column(self.column), groups, self.limit)
        if not known.any():
            return new
        by_key = _by_key([*old, *new])
        width = 2 * self.limit
        return reductions.leading(by_key, Groups(np.arange(0, number * width, width), number * width), self.limit)

    def result(self, state: Sequence[pa.Array]) -> pa.Array:
        """Collect the values of each key."""
        number = len(state[0])
        by_key = _by_key(state)
        offsets = np.concatenate([[0], np.cumsum(valid(by_key).reshape(number, -1).sum(axis=1))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), by_key.drop_null())


@dataclass(frozen=True)
class Last(Aggregation, Combinable):
    """
    The value of the newest row.

    Args:
        by: The column that orders the rows, such as the event time; rows where it is null are ignored. Among equally
            new rows the greatest value wins, so that the result is deterministic.
    """

    by: str = ""
    meaning = "last"

    def state_types(self, rows: pa.Schema) -> list[pa.DataType]:
        """Return value and time."""
        if self.by == "":
            raise InvalidInputError(
                f"{self.output_name} needs by=…, the column that orders the rows, such as the event time"
            )
        check_column(f"{self.output_name}: by", self.by)
        return [*Min(self.column, self.output_name).state_types(rows), *Min(self.by).state_types(rows)]

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Sequence[pa.Array], known: Bools) -> list[pa.Array]:
        """Choose among old and new values."""
        new = self.combine([rows.column(self.column), rows.column(self.by)], groups)
        return self.added(old, new, known)

    def combine(self, states: Sequence[pa.Array], groups: Groups) -> list[pa.Array]:
        """Choose among the values."""
        value, by = states
        by, value = reductions.by_order([by, value], groups, greatest=True)
        return [value, by]


def _by_key(columns: Sequence[pa.Array]) -> pa.Array:
    """Return the values of columns key by key."""
    both = pa.concat_arrays(list(columns))
    return both.take(pa.array(np.arange(len(both)).reshape(len(columns), -1).T.reshape(-1)))
