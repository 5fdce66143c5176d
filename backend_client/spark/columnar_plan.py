"""A columnar operator as its tasks need it, and the driver's checks of it before the query starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from backend_client.batch_time import BatchTime
from backend_client.columnar.processor import MEANING, BatchMoment, ColumnarProcessor, OutputMode
from backend_client.columnar.state import INDEX, STATE
from backend_client.columnar.values import StateColumns
from backend_client.columnar.windows import Windows
from backend_client.spark.columns import check_bytewise
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.private.frames import arrow_schema, spark_schema
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_UNIT = "dstl.unit"
"""Metadata key for the unit of a stored time; Spark's types do not distinguish units."""
_WINDOW = "dstl.window"
"""Metadata key for the size of a stored window in microseconds; keys have only the windows' starts."""
_PLACES = "dstl.places"
"""Metadata key for slide and offset of stored windows, in microseconds: others begin where rows are counted already."""
_MEANING = MEANING.decode()
_LATER = (_MEANING, _PLACES)
"""What jobs of earlier versions have not stored, so that nothing can be compared with it."""


@dataclass(frozen=True, slots=True)
class ColumnarPlan:
    """
    A columnar operator as its tasks need it.

    Args:
        processor: The user's processor.
        output_mode: The operator's output mode.
        keys: The grouping columns.
        rows: The input's columns.
        has_watermark: Whether one of them has a watermark.
    """

    processor: ColumnarProcessor
    output_mode: OutputMode
    keys: pa.Schema
    rows: pa.Schema
    has_watermark: bool

    @classmethod
    def of(
        cls,
        processor: ColumnarProcessor,
        output_mode: str,
        input_schema: StructType,
        key_columns: Sequence[str],
        *,
        is_first: bool = True,
    ) -> ColumnarPlan:
        """
        Return the plan of a processor on its input.

        Raises:
            InvalidInputError: Processor and input do not fit.
        """
        if not isinstance(processor, ColumnarProcessor):
            raise InvalidInputError(f"transform_columns takes a ColumnarProcessor, not {type(processor).__name__}")
        if not isinstance(processor.windows, Windows | None):
            raise InvalidInputError(
                f"the windows of {type(processor).__name__} must be tumbling(…) or sliding(…), not "
                f"{processor.windows!r}"
            )
        mode: OutputMode = "append" if output_mode.lower() == "append" else "update"
        check_bytewise(input_schema, "Arrow arrays, which a columnar operator computes with, have no collation")
        rows = arrow_schema(input_schema)
        keys = arrow_schema(StructType([input_schema[name] for name in key_columns]))
        processor.check(rows, mode)
        marked = [field.name for field in input_schema.fields if DELAY_KEY in (field.metadata or {})]
        _check_watermark(processor, mode, marked, is_first=is_first)
        return cls(processor, mode, keys, rows, bool(marked))

    def moments(self, time: BatchTime | None) -> tuple[BatchMoment, BatchMoment]:
        """
        Return the moments for the batch's rows and for state that ends after them.

        A stream's watermark begins at 0, as in Spark; that of a stream without one, which Spark writes as 0, is None.
        Rows get the watermark of the batch before, as in Spark; it differs if that batch was left open.
        """
        if time is None:
            return BatchMoment(self.output_mode), BatchMoment(self.output_mode)
        rows_ms, ends_ms = (
            moment if moment or self.has_watermark else None
            for moment in (time.previous_watermark_ms, time.watermark_ms)
        )
        of_ends = BatchMoment(self.output_mode, ends_ms, time.timestamp_ms)
        return replace(of_ends, watermark_ms=rows_ms), of_ends

    @property
    def all_keys(self) -> pa.Schema:
        """The key columns that the processor sees, with those of its windows."""
        windows = self.processor.windows
        return pa.schema([*self.keys, *(windows.fields(self.rows) if windows is not None else ())])

    def states(self) -> dict[str, StateInfo]:
        """
        Return the operator's state variables.

        Raises:
            InvalidInputError: A state field has an unsupported type.
        """
        schema = self._schema("state_schema", self.processor.state_schema(self.rows))
        StateColumns(schema)
        columns = spark_schema(schema)
        windows = self.processor.windows
        for column, field in zip(columns, schema, strict=True):
            if windows is not None:
                places = [windows.slide_us, windows.offset_us % windows.slide_us]
                column.metadata = {**column.metadata, _WINDOW: windows.size_us, _PLACES: places}
            if meaning := (field.metadata or {}).get(MEANING):
                column.metadata = {**column.metadata, _MEANING: meaning.decode()}
            if pa.types.is_timestamp(field.type) or pa.types.is_duration(field.type):
                column.metadata = {**column.metadata, _UNIT: field.type.unit}
        states = {STATE: StateInfo(1, STATE, columns.json())}
        if windows is not None or self.processor.expires:
            states[INDEX] = StateInfo(2, INDEX, StructType().json())
        return states

    def _schema(self, method: str, returned: Any) -> pa.Schema:
        if not isinstance(returned, pa.Schema):
            raise InvalidInputError(
                f"{method} of {type(self.processor).__name__} must return a pyarrow.Schema, not {returned!r}"
            )
        return returned

    def check_stored(self, operator: str, stored: Mapping[str, StateInfo]) -> None:
        """
        Compare the state's columns with those of stored state, whose bytes only its own columns can read.

        Raises:
            InvalidInputError: The columns differ; the message names the first difference.
        """
        if STATE not in stored:
            return
        both = stored, self.states()
        fields = [StructType.fromJson(json.loads(states[STATE].schema)).fields for states in both]
        old, new = (
            [(field.name, _kind(field, other)) for field, other in zip_longest(*pair) if field is not None]
            for pair in (fields, fields[::-1])
        )
        ends = [("state that ends", "") if INDEX in states else None for states in both]
        if old != new or ends[0] != ends[1]:
            pairs = [(ends[0], ends[1]), *zip_longest(old, new)]
            was, now = (
                "no such column" if part is None else " ".join(part).strip()
                for part in next(pair for pair in pairs if pair[0] != pair[1])
            )
            raise InvalidInputError(
                f"the columnar state of operator {operator!r} was stored with {was} where its processor has {now}; "
                "columnar state cannot change its columns or windows: use the stored ones again, or start with "
                "another job name and checkpointLocation"
            )

    def output_schema(self) -> StructType:
        """
        Return the columns of the output.

        Raises:
            InvalidInputError: The processor does not define it, or two columns have one name.
        """
        schema = self.processor.output_schema(self.all_keys, self.rows)
        if schema is None:
            raise InvalidInputError(
                f"{type(self.processor).__name__} has no output_schema; pass outputStructType to transform_columns"
            )
        schema = self._schema("output_schema", schema)
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise InvalidInputError(
                f"the output of {type(self.processor).__name__} would have two columns named {twice!r}: keys, windows "
                "and results are columns side by side. Give the result another name=…, or rename the key"
            )
        return spark_schema(schema)


def _check_watermark(
    processor: ColumnarProcessor, output_mode: OutputMode, marked: Sequence[str], *, is_first: bool
) -> None:
    """
    Check that state which ends by event time has a watermark, on the column that the processor uses.

    After another operator, an unmarked column may still hold times that fit the stream's watermark, so this is not an
    error; the log warns.

    Raises:
        InvalidInputError: The watermark is on another column, or windows in append mode would never be emitted.
    """
    windows, name = processor.windows, type(processor).__name__
    column = processor.watermark_column if windows is None else windows.column
    if column is None and not processor.expires:
        return
    if marked:
        if column is not None and column not in marked:
            how = (
                f"call withWatermark on {column!r} before groupBy"
                if is_first
                else f"name {column!r} as eventTimeColumnName of the operator before it"
            )
            raise InvalidInputError(
                f"processor {name} uses the event times in {column!r}, but the watermark is on "
                f"{' and '.join(map(repr, marked))}: give the processor that column, or {how}"
            )
        return
    if not is_first:
        logger.warning(
            "processor %s ends state by event time, but no column of its input has a watermark: unless the stream has "
            "one, state grows forever. Set eventTimeColumnName on the operator before it",
            name,
        )
    elif windows is not None and output_mode == "append":
        raise InvalidInputError(
            f"processor {name} emits windows in append mode when the watermark has passed their end, but the input "
            f"has no watermark: call withWatermark on {column!r} before groupBy, or use outputMode 'Update'"
        )
    else:
        logger.warning(
            "processor %s ends state by event time, but its input has no watermark, so state grows forever. Call "
            "withWatermark before groupBy",
            name,
        )


def _kind(field: StructField, other: StructField | None) -> str:
    """Return a field's type, with its unit if it is a time, its meaning and its window, as far as both fields say."""
    known = dict(field.metadata)
    if other is not None:
        known = {key: value for key, value in known.items() if key not in _LATER or key in other.metadata}
    text = field.dataType.simpleString()
    if _UNIT in known:
        text += f" in {known[_UNIT]}"
    if _MEANING in known:
        text += f" ({known[_MEANING]})"
    if _WINDOW in known:
        slide_us, offset_us = known.get(_PLACES, (known[_WINDOW], 0))
        text += f" per window of {_seconds(known[_WINDOW])}"
        text += f" every {_seconds(slide_us)}" if slide_us != known[_WINDOW] else ""
        text += f" from {_seconds(offset_us)}" if offset_us else ""
    return text


def _seconds(size_us: int) -> str:
    return f"{Decimal(size_us).scaleb(-6).normalize():f} s"
