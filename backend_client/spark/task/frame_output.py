"""
Converts the pandas frames that a user's function yields to Arrow columns.

Frames with equal column types are converted together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.types import DataType, StructType

from backend_client.spark.private.frames import arrow_type, column_arrays, converter_from_pandas
from backend_client.spark.task.pandas_settings import PandasSettings
from storage.errors import InvalidInputError


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
        self._convert = [_from_pandas(field.dataType, settings) for field in schema.fields]

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


def _from_pandas(kind: DataType, settings: PandasSettings) -> Callable[[pd.Series[Any]], pd.Series[Any]]:
    convert = converter_from_pandas(kind, settings.timezone, decimals_of_integers=settings.decimals_of_integers)

    def whole(series: pd.Series[Any]) -> pd.Series[Any]:
        if isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(series.dtype.categories.dtype)
        return convert(series)  # type: ignore[no-any-return]

    return whole


def _joined(arrays: Sequence[Any]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    return pd.concat([pd.Series(array) for array in arrays], ignore_index=True).array
