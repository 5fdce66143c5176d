"""
Private interfaces of Spark's and pandas' frames: types and converters to and from Arrow, and blocks.

Without access to pandas' blocks, frames are sliced by public methods, which give the same frames more slowly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.pandas import types as spark_types
from pyspark.sql.types import DataType, StructType

from backend_client.spark.private.session import needed

try:
    from pandas.core.internals.managers import BlockManager  # type: ignore[import-not-found]
except ImportError:
    BlockManager = None

_METADATA = b"SPARK::metadata::json"
"""The key of a column's metadata in Arrow since PySpark 4.2; earlier versions drop it, and with it the watermark."""
_ROWS_API = "use the API of rows (transformWithState)"


@cache
def _in_utc() -> Mapping[str, Any]:
    # PySpark 4.1 lacks this argument and always uses UTC.
    return {"timezone": "UTC"} if "timezone" in signature(spark_types.to_arrow_type).parameters else {}


@cache
def _with_integer_nulls() -> Mapping[str, Any]:
    # PySpark 4.1 lacks this argument; it turns integers with nulls inside a value into floats.
    name = "integer_object_nulls"
    return {name: True} if name in signature(spark_types._create_converter_to_pandas).parameters else {}


def arrow_type(kind: DataType) -> pa.DataType:
    """Return a type's Arrow type; timestamps are in UTC."""
    with needed("to_arrow_type", "Arrow batches cannot be made without it"):
        return spark_types.to_arrow_type(kind, **_in_utc())


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return a schema as Arrow's, with the columns' metadata; timestamps are in UTC."""
    with needed("to_arrow_schema", "Arrow batches cannot be made without it"):
        fields = spark_types.to_arrow_schema(schema, **_in_utc())
    if hasattr(spark_types, "to_arrow_metadata"):
        return fields
    pairs = zip(fields, schema.fields, strict=True)
    return pa.schema([there.with_metadata({_METADATA: json.dumps(here.metadata or {})}) for there, here in pairs])


def spark_type(kind: pa.DataType) -> DataType:
    """Return an Arrow type's type; timestamps without zone stay without one."""
    with needed("from_arrow_type", _ROWS_API):
        return spark_types.from_arrow_type(kind, prefer_timestamp_ntz=True)


def spark_schema(schema: pa.Schema) -> StructType:
    """Return an Arrow schema as Spark's, with the columns' metadata; timestamps without zone stay without one."""
    with needed("from_arrow_schema", _ROWS_API):
        found = spark_types.from_arrow_schema(schema, prefer_timestamp_ntz=True)
    if not hasattr(spark_types, "from_arrow_metadata"):
        for field, there in zip(found.fields, schema, strict=True):
            field.metadata = json.loads((there.metadata or {}).get(_METADATA, b"{}"))
    return found


def converter_to_pandas(kind: DataType, timezone: str) -> Callable[[Any], Any]:
    """Return a converter from a series of Arrow's values to the series that Spark's pandas API passes to functions."""
    with needed("_create_converter_to_pandas", _ROWS_API):
        return spark_types._create_converter_to_pandas(
            kind,
            timezone=timezone,
            struct_in_pandas="dict",
            error_on_duplicated_field_names=True,
            **_with_integer_nulls(),
        )


def converter_from_pandas(kind: DataType, timezone: str, *, decimals_of_integers: bool = False) -> Callable[[Any], Any]:
    """Return a converter from a user's series to one that Arrow accepts; whole numbers may become decimals."""
    # PySpark 4.1 lacks this argument.
    name = "int_to_decimal_coercion_enabled"
    with needed("_create_converter_from_pandas", _ROWS_API):
        make = spark_types._create_converter_from_pandas
        more = {name: decimals_of_integers} if name in signature(make).parameters else {}
        convert = make(kind, timezone=timezone, error_on_duplicated_field_names=False, **more)

    def whole(series: pd.Series[Any]) -> Any:
        if isinstance(series.dtype, pd.CategoricalDtype):
            series = series.astype(series.dtype.categories.dtype)
        return convert(series)

    return whole


def keeps_column_types() -> bool:
    """Return whether Spark's frames have the columns' own types beside an initial state: PySpark 4.1 widens none."""
    return not _with_integer_nulls()


def column_arrays(frame: pd.DataFrame) -> list[Any]:
    """Return a frame's columns as arrays of their own types: NumPy's, or those of pandas' extension types."""
    try:
        manager: Any = frame._mgr
        if not any(block.is_extension for block in manager.blocks):
            return list(manager.column_arrays)
    except (AttributeError, TypeError):
        pass  # this pandas version has another internal layout
    return [_array_of(frame.iloc[:, position]) for position in range(frame.shape[1])]


def _array_of(series: pd.Series[Any]) -> Any:
    return np.asarray(series) if isinstance(series.dtype, np.dtype) else series.array


class SlicedFrame:
    """A frame with fast row slices that share its memory and have an index from 0."""

    __slots__ = ("_blocks", "_columns", "_frame", "_indexes", "_places")

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame
        self._indexes: dict[int, pd.RangeIndex] = {}
        self._blocks: Any = None
        try:
            manager: Any = frame._mgr.consolidate()
            self._columns = manager.axes[0]
            self._blocks = [(type(block), block.values, block.mgr_locs) for block in manager.blocks]
            self._places = manager.blknos, manager.blklocs
            self.part(0, 0)
        except (AttributeError, TypeError, IndexError):
            self._blocks = None  # this pandas version, or these columns, have another internal layout

    def __len__(self) -> int:
        return len(self._frame)

    def part(self, start: int, stop: int) -> pd.DataFrame:
        """Return the rows from `start` (inclusive) to `stop` (exclusive)."""
        if self._blocks is None:
            return self._frame.iloc[start:stop].reset_index(drop=True)
        count = stop - start
        index = self._indexes.get(count)
        if index is None:
            index = self._indexes[count] = pd.RangeIndex(count)
        blocks = [kind(values[:, start:stop], places, 2) for kind, values, places in self._blocks]
        manager = BlockManager(blocks, [self._columns, index], verify_integrity=False)
        manager._blknos, manager._blklocs = self._places  # else the first column access would recompute them
        return pd.DataFrame._from_mgr(manager, manager.axes)  # type: ignore[attr-defined,no-any-return]
