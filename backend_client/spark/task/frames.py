"""
Converts between Arrow batches and the pandas frames of a user's function.

A batch becomes one frame, and each key gets a slice of it. pandas' own slicing costs ten times as much as a state call,
so slices are built from the frame's blocks. Columns have the types of Spark's own pandas API: integers of any width
become 64-bit (beside an initial state not in Spark 4.1), integers with nulls become floats, and timestamps are in the
session's time zone without zone info.
Returned frames with equal column types are converted together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from keyword import iskeyword
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backend_client.spark.private.frames import (
    SlicedFrame,
    arrow_type,
    column_arrays,
    converter_from_pandas,
    converter_to_pandas,
    keeps_column_types,
    spark_type,
)
from backend_client.spark.task.initial_rows import InitialRows
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.rows import GroupedRows
from storage.errors import InvalidInputError


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

    def _parts(self, columns: Sequence[pa.Array], names: Sequence[str]) -> _Parts | _Slices:
        if keeps_column_types():
            return _Slices(columns, lambda part: _own_types(part, names, self._timezone))
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


class FramePair(NamedTuple):
    """A key's initial rows in a batch, and its input rows."""

    initial: pd.DataFrame | None
    input: pd.DataFrame | None


class _Pairs:
    """Initial rows followed by input rows; a slice by rows holds one pair."""

    def __init__(
        self,
        inputs_before: np.ndarray[Any, Any],
        initial: _Parts | _Slices,
        inputs: _Parts | _Slices,
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


class FramesToArrow:
    """
    Builds Arrow columns from the frames that a user's function yields, matching columns by name as Spark does.

    Args:
        schema: The operator's output schema.
        settings: The session's pandas settings.
    """

    def __init__(self, schema: StructType, settings: PandasSettings) -> None:
        self.names = schema.names
        arrow = arrow_type(schema)
        self.types = [arrow.field(position).type for position in range(arrow.num_fields)]
        self._settings = settings
        self._mutable = [pa.types.is_nested(kind) or pa.types.is_binary(kind) for kind in self.types]
        self._convert = [
            converter_from_pandas(field.dataType, settings.timezone, decimals_of_integers=settings.decimals_of_integers)
            for field in schema.fields
        ]

    def taken(self, frames: Iterator[Any]) -> Iterator[list[Any]]:
        """Yield each frame's arrays as they are now: as on Spark, a processor may change what it has yielded."""
        for frame in frames:
            yield [
                deepcopy(array) if mutable and array.dtype == object else array.copy()
                for array, mutable in zip(self._arrays(frame), self._mutable, strict=True)
            ]

    def columns(self, frames: Sequence[list[Any]]) -> list[pa.Array]:
        """
        Return one array per field, of frames that `taken` has yielded.

        Raises:
            InvalidInputError: A yielded object is not a frame, a column is missing, or a value does not fit its type.
        """
        alike: dict[Any, list[int]] = defaultdict(list)
        for position, arrays in enumerate(frames):
            alike[tuple(array.dtype for array in arrays)].append(position)
        if not frames:
            return [pa.nulls(0, kind) for kind in self.types]
        pieces: list[list[pa.Array]] = []
        for positions in alike.values():
            try:
                columns = zip(*(frames[at] for at in positions), strict=True)
                pieces.append(self._to_arrow([_joined(arrays) for arrays in columns], several=len(positions) > 1))
            except InvalidInputError:  # object columns may have uniform types only within each frame
                pieces += [self._to_arrow(frames[at]) for at in positions]
        joined = [pa.concat_arrays(arrays) for arrays in zip(*pieces, strict=True)]
        if len(alike) == 1:
            return joined
        lengths = [len(arrays[0]) for arrays in frames]
        starts = np.cumsum([0, *lengths])
        order = np.concatenate(
            [np.arange(starts[at], starts[at + 1]) for positions in alike.values() for at in positions]
        )
        places = pa.array(np.argsort(order, kind="stable"))
        return [array.take(places) for array in joined]

    def _arrays(self, frame: Any) -> list[Any]:
        if not isinstance(frame, pd.DataFrame):
            raise InvalidInputError(
                f"the processor yielded {type(frame).__name__}; in the pandas API it must yield pandas.DataFrame"
            )
        arrays = column_arrays(frame)
        labels = frame.columns.tolist()
        if labels == self.names:
            return arrays
        if not labels:
            return [np.full(len(frame), None, dtype=object) for _ in self.names]
        if self._settings.by_name and any(isinstance(label, str) for label in labels):
            missing = [name for name in self.names if name not in labels]
            if missing:
                raise InvalidInputError(
                    f"the processor yielded a frame with the columns {', '.join(map(str, labels))}, which lacks "
                    f"{', '.join(missing)} of the output schema"
                )
            return [arrays[labels.index(name)] for name in self.names]
        if len(arrays) < len(self.names):
            raise InvalidInputError(
                f"the processor yielded a frame with {len(arrays)} columns, the output schema has {len(self.names)}"
            )
        return arrays[: len(self.names)]

    def _to_arrow(self, arrays: Sequence[Any], *, several: bool = False) -> list[pa.Array]:
        converted = []
        for name, kind, convert, array in zip(self.names, self.types, self._convert, arrays, strict=True):
            try:
                series = convert(pd.Series(array, dtype=array.dtype))
                # Objects of several frames together may have another type than those of each.
                converted.append(self._column(series, kind, castable=not several or array.dtype != object))
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                raise InvalidInputError(
                    f"values of output column {name!r} do not fit its type {kind}: {error}"
                ) from error
        return converted

    def _column(self, series: pd.Series[Any], kind: pa.DataType, *, castable: bool) -> pa.Array:
        mask = None if hasattr(series.array, "__arrow_array__") else series.isna()
        safely = self._settings.safely
        try:
            array = pa.Array.from_pandas(series, mask=mask, type=kind, safe=safely)
        except pa.ArrowInvalid:
            if not castable:
                raise
            array = pa.Array.from_pandas(series, mask=mask).cast(kind, safe=safely)
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _own_types(columns: Sequence[pa.Array], names: Sequence[str], timezone: str) -> pd.DataFrame:
    """Return a frame with the columns' own types, which its nulls decide, and their own names."""
    series = (column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True) for column in columns)
    convert = (converter_to_pandas(spark_type(column.type), timezone) for column in columns)
    frame = pd.DataFrame({at: change(values) for at, (change, values) in enumerate(zip(convert, series, strict=True))})
    frame.columns = pd.Index(names)
    return frame


def _whole_numbers(column: pa.Array) -> Any:
    """Return whole numbers in their own width, as objects beside `pandas.NA` if there are nulls."""
    if not column.null_count:
        return column.to_pandas()
    width = column.type.to_pandas_dtype()
    return np.array([pd.NA if number is None else width(number) for number in column.to_pylist()], dtype=object)


def _joined(arrays: Sequence[Any]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    return pd.concat([pd.Series(array) for array in arrays], ignore_index=True).array


def _attribute_names(names: Sequence[str]) -> list[str]:
    """Return the columns' names as in Spark's frames: one that is not a Python identifier becomes ``_position``."""
    seen: set[str] = set()
    result = []
    for position, name in enumerate(names):
        usable = name.isidentifier() and not iskeyword(name) and not name.startswith("_") and name not in seen
        result.append(name if usable else f"_{position}")
        seen.add(name)
    return result
