"""A columnar operator as its tasks need it, and what the driver finds out about it before the query starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from backend_client.batch_time import BatchTime
from backend_client.columnar.processor import BatchMoment, ColumnarProcessor, OutputMode
from backend_client.columnar.state import INDEX, STATE
from backend_client.columnar.values import StateColumns
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.private.frames import arrow_schema, spark_schema
from dstl_service.wire import StateInfo
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_UNIT = "dstl.unit"
"""Names the unit of a stored time in its field's metadata: to Spark's types, all units are one."""


@dataclass(frozen=True, slots=True)
class ColumnarPlan:
    """
    A columnar operator as its tasks need it.

    Args:
        processor: The user's.
        output_mode: Of the query.
        keys: The grouping columns.
        rows: The input's columns.
    """

    processor: ColumnarProcessor
    output_mode: OutputMode
    keys: pa.Schema
    rows: pa.Schema

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
        Join a processor with its input.

        Raises:
            InvalidInputError: They do not fit.
        """
        if not isinstance(processor, ColumnarProcessor):
            raise InvalidInputError(f"a ColumnarProcessor is needed, not {type(processor).__name__}")
        mode: OutputMode = "append" if output_mode.lower() == "append" else "update"
        rows = arrow_schema(input_schema)
        keys = arrow_schema(StructType([input_schema[name] for name in key_columns]))
        processor.check(rows, mode)
        marked = [field.name for field in input_schema.fields if DELAY_KEY in (field.metadata or {})]
        _check_watermark(processor, mode, marked, is_first=is_first)
        return cls(processor, mode, keys, rows)

    def moments(self, time: BatchTime | None) -> tuple[BatchMoment, BatchMoment]:
        """
        Return what the processor is told with rows, and with state that ends behind them; a watermark of 0 is none.

        For rows the watermark of the batch before counts, as on Spark: it is another one where that was left open.
        """
        if time is None:
            return BatchMoment(self.output_mode), BatchMoment(self.output_mode)
        of_ends = BatchMoment(self.output_mode, time.watermark_ms or None, time.timestamp_ms)
        return replace(of_ends, watermark_ms=time.previous_watermark_ms or None), of_ends

    @property
    def all_keys(self) -> pa.Schema:
        """The columns of the keys that the processor sees."""
        windows = self.processor.windows
        return pa.schema([*self.keys, *(windows.fields(self.rows) if windows is not None else ())])

    def states(self) -> dict[str, StateInfo]:
        """
        Return the operator's state variables.

        Raises:
            InvalidInputError: A field of the state is of an impossible type.
        """
        schema = self.processor.state_schema(self.rows)
        StateColumns(schema)
        columns = spark_schema(schema)
        for column, field in zip(columns, schema, strict=True):
            if pa.types.is_timestamp(field.type) or pa.types.is_duration(field.type):
                column.metadata = {**column.metadata, _UNIT: field.type.unit}
        states = {STATE: StateInfo(1, STATE, columns.json())}
        if self.processor.windows is not None or self.processor.expires:
            states[INDEX] = StateInfo(2, INDEX, StructType().json())
        return states

    def check_stored(self, operator: str, stored: Mapping[str, StateInfo]) -> None:
        """
        Compare the state's columns with those of stored state, whose bytes can be read with these only.

        Of a time that was stored before its unit was written down, any unit may be right, and is taken for it.

        Raises:
            InvalidInputError: They differ; names the first that does.
        """
        if STATE not in stored:
            return
        old_fields, new_fields = _fields(stored[STATE].schema), _fields(self.states()[STATE].schema)
        for known, field in zip(old_fields, new_fields, strict=False):
            if known.dataType == field.dataType:
                known.metadata = {**field.metadata, **known.metadata}
        old, new = ([(field.name, _kind(field)) for field in fields] for fields in (old_fields, new_fields))
        if old != new or (INDEX in stored) != (INDEX in self.states()):
            ends = [("state that ends", "") if INDEX in states else None for states in (stored, self.states())]
            pairs = [*zip_longest(old, new), (ends[0], ends[1])]
            was, now = (
                "no such column" if part is None else " ".join(part).strip()
                for part in next(pair for pair in pairs if pair[0] != pair[1])
            )
            raise InvalidInputError(
                f"the columnar state of operator {operator!r} was stored with {was} where its processor has {now}; "
                "columnar state never changes its columns: go back to them, or begin anew with another job name and "
                "checkpointLocation"
            )

    def output_schema(self) -> StructType:
        """
        Return the columns of the output.

        Raises:
            InvalidInputError: The processor does not say it.
        """
        schema = self.processor.output_schema(self.all_keys, self.rows)
        if schema is None:
            raise InvalidInputError(f"{type(self.processor).__name__} has no output_schema; give outputStructType")
        return spark_schema(schema)


def _check_watermark(
    processor: ColumnarProcessor, output_mode: OutputMode, marked: Sequence[str], *, is_first: bool
) -> None:
    """
    Check that state which ends by event time has a watermark, and that it is on the column that the processor goes by.

    Behind another operator, a column that nobody marked may have times that the stream's watermark suits, so that is no
    error; the log says it.

    Raises:
        InvalidInputError: The watermark is on another column, or windows in append mode would never be put out.
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
                f"processor {name} goes by the times in {column!r}, but the watermark is on "
                f"{' and '.join(map(repr, marked))}: give the processor that column, or {how}"
            )
        return
    if not is_first:
        logger.warning(
            "processor %s ends state by event time, but no column of its input has a watermark: unless the stream has "
            "one, state grows for ever. Name the eventTimeColumnName of the operator before it",
            name,
        )
    elif windows is not None and output_mode == "append":
        raise InvalidInputError(
            f"processor {name} puts windows out in append mode when the watermark has passed their end, but the input "
            f"has no watermark: call withWatermark on {column!r} before groupBy, or use outputMode 'Update'"
        )
    else:
        logger.warning(
            "processor %s ends state by event time, but its input has no watermark: state grows for ever. Call "
            "withWatermark before groupBy",
            name,
        )


def _fields(schema: str) -> list[StructField]:
    return StructType.fromJson(json.loads(schema)).fields


def _kind(field: StructField) -> str:
    """Return a field's type, with the unit of a time."""
    unit = field.metadata.get(_UNIT)
    return field.dataType.simpleString() + ("" if unit is None else f" in {unit}")
