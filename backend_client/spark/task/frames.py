"""
Converts Arrow batches to the pandas frames of a user's function; for its output see `frame_output`.

A batch becomes one frame, and each key gets a slice of it. pandas' own slicing costs ten times as much as a state call,
so slices are built from the frame's blocks. Columns have the types of Spark's own pandas API: integers of any width
become 64-bit (beside an initial state not in Spark 4.1), integers with nulls become floats, and timestamps are in the
session's time zone without zone info.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.spark.private.frames import (
    SlicedFrame,
    converter_to_pandas,
    keeps_column_types,
    spark_type,
)
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.rows import GroupedRows


class GroupedFrames(GroupedRows):
    """
    Splits sorted Arrow batches by key; a key's rows are an iterator of frames, one for each batch.

    With `initial`, the rows include the initial state, and the iterator yields `FramePair`s.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        key_count: int,
        names: Sequence[str],
        settings: PandasSettings,
        initial: InitialFrames | None = None,
    ) -> None:
        super().__init__(batches, key_count, names)
        self._names = names
        self._timezone = settings.timezone
        self._integers_stay = settings.integers_stay
        self._initial = initial

    def _rows(self, columns: Sequence[pa.Array]) -> Any:
        if self._initial is None:
            return self._alike(columns, self._names)
        inputs, marker, initials = self._initial.divide(columns)
        return _Pairs(
            np.concatenate(([0], np.cumsum(marker.to_numpy(zero_copy_only=False)))),
            self._parts(initials, self._initial.initial_names),
            self._parts(inputs, self._initial.input_names),
        )

    def _parts(self, columns: Sequence[pa.Array], names: Sequence[str]) -> _Parts | _Slices | _OwnTypes:
        if keeps_column_types():
            return _OwnTypes(columns, names, self._timezone)
        return self._alike(columns, names)

    def _alike(self, columns: Sequence[pa.Array], names: Sequence[str]) -> _Parts | _Slices:
        if self._integers_stay:
            return _Slices(columns, lambda part: self._frame(part, names))
        return _Parts(self._frame(columns, names))

    def _frame(self, columns: Sequence[pa.Array], names: Sequence[str]) -> pd.DataFrame:
        frame = pd.DataFrame(dict(enumerate(self._series(column) for column in columns)))
        frame.columns = pd.Index(_attribute_names(names))
        return frame

    def _series(self, column: pa.Array) -> Any:
        kind = column.type
        if pa.types.is_timestamp(kind):
            if kind.tz is not None:
                column = pc.local_timestamp(column.cast(pa.timestamp(kind.unit, self._timezone)))
            return column.cast(pa.timestamp("ns")).to_pandas()
        if pa.types.is_integer(kind):
            if self._integers_stay:
                return _whole_numbers(column)
            series = column.to_pandas()
            return series if series.dtype == np.float64 else series.astype(np.int64)
        if pa.types.is_floating(kind):
            return column.to_pandas().astype(np.float64)
        series = column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=True)
        return converter_to_pandas(spark_type(kind), self._timezone)(series)


class _Parts:
    """A frame with fast slices; a slice holds one frame, with an index from 0."""

    __slots__ = ("_frame", "_infer")

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = SlicedFrame(frame)
        # A boolean column with nulls has dtype object; Spark makes a part without nulls boolean again.
        self._infer = any(
            series.dtype == object and pd.api.types.infer_dtype(series, skipna=True) == "boolean"
            for _, series in frame.items()
        )

    def __iter__(self) -> Iterator[pd.DataFrame]:
        yield self._part(0, len(self._frame))

    def __getitem__(self, rows: slice) -> tuple[pd.DataFrame]:
        start, stop, _ = rows.indices(len(self._frame))
        return (self._part(start, stop),)

    def _part(self, start: int, stop: int) -> pd.DataFrame:
        part = self._frame.part(start, stop)
        return part.infer_objects() if self._infer else part


class _Slices:
    """Columns of which a slice holds one frame, whose types its own nulls decide."""

    __slots__ = ("_columns", "_frame")

    def __init__(self, columns: Sequence[pa.Array], frame: Callable[[Sequence[pa.Array]], pd.DataFrame]) -> None:
        self._columns = columns
        self._frame = frame

    def __iter__(self) -> Iterator[pd.DataFrame]:
        return iter(self[:])

    def __getitem__(self, rows: slice) -> tuple[pd.DataFrame]:
        return (self._frame([column[rows] for column in self._columns]),)


class _OwnTypes:
    """Columns of which a slice holds one frame; its own nulls decide its types, and it has the columns' own names."""

    def __init__(self, columns: Sequence[pa.Array], names: Sequence[str], timezone: str) -> None:
        self._columns = columns
        self._names = pd.Index(names)
        self._convert = [converter_to_pandas(spark_type(column.type), timezone) for column in columns]

    def __getitem__(self, rows: slice) -> tuple[pd.DataFrame]:
        parts = (column[rows] for column in self._columns)
        series = (part.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True) for part in parts)
        frame = pd.DataFrame({at: self._convert[at](values) for at, values in enumerate(series)})
        frame.columns = self._names
        return (frame,)


class FramePair(NamedTuple):
    """A key's initial rows in a batch, and its input rows."""

    initial: pd.DataFrame | None
    input: pd.DataFrame | None


class _Pairs:
    """Initial rows followed by input rows; a slice by rows holds one pair."""

    def __init__(
        self,
        inputs_before: np.ndarray[Any, Any],
        initial: _Parts | _Slices | _OwnTypes,
        inputs: _Parts | _Slices | _OwnTypes,
    ) -> None:
        self._inputs_before = inputs_before
        self._initial = initial
        self._inputs = inputs

    def __iter__(self) -> Iterator[FramePair]:
        return iter(self[:])

    def __getitem__(self, rows: slice) -> tuple[FramePair]:
        start, stop, _ = rows.indices(len(self._inputs_before) - 1)
        first, last = int(self._inputs_before[start]), int(self._inputs_before[stop])
        initial = self._initial[start - first : stop - last][0] if stop - last > start - first else None
        return (FramePair(initial, self._inputs[first:last][0] if last > first else None),)


@dataclass(frozen=True, slots=True)
class InitialFrames(InitialRows):
    """Separates frames of initial and input rows."""

    def divide(self, columns: Sequence[pa.Array]) -> tuple[list[pa.Array], pa.Array, list[pa.Array]]:
        """Return the input rows' columns, which rows are input rows, and the initial rows' columns."""
        inputs = len(self.input_names)
        marker = columns[inputs]
        other = pc.invert(marker)
        initials = columns[inputs + 1 + self.key_count :]
        return (
            [column.filter(marker) for column in columns[:inputs]],
            marker,
            [column.filter(other) for column in initials],
        )

    def splitter(self) -> Callable[[Iterable[Any], Callable[[Any], None]], Iterator[Any] | None]:
        """Return a function that passes a key's initial frames to a callback and returns its input frames, or None."""

        def split(pairs: Iterable[FramePair], take: Callable[[pd.DataFrame], None]) -> Iterator[Any] | None:
            left = iter(pairs)
            for pair in left:
                if pair.initial is not None:
                    take(pair.initial)
                if pair.input is not None:
                    return chain([pair.input], (later.input for later in left))
            return None

        return split


def _whole_numbers(column: pa.Array) -> Any:
    """Return whole numbers in their own width, as objects beside `pandas.NA` if there are nulls."""
    if not column.null_count:
        return column.to_pandas()
    width = column.type.to_pandas_dtype()
    return np.array([pd.NA if number is None else width(number) for number in column.to_pylist()], dtype=object)


def _attribute_names(names: Sequence[str]) -> list[str]:
    """Return the columns' names as in Spark's frames: one that is not a Python identifier becomes ``_position``."""
    seen: set[str] = set()
    result = []
    for position, name in enumerate(names):
        usable = name.isidentifier() and not iskeyword(name) and not name.startswith("_") and name not in seen
        result.append(name if usable else f"_{position}")
        seen.add(name)
    return result
