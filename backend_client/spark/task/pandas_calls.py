"""
Calls a processor of the pandas API like one of the Row API, with frames in place of rows.

`RowCalls` makes the calls; the input (`GroupedFrames`), the key's timestamps and the conversion of the output to Arrow
(`FramesToArrow`) differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from backend_client.portions import Portion
from backend_client.spark.task.frames import FramesToArrow, GroupedFrames, InitialFrames
from backend_client.spark.task.pandas_settings import PandasSettings
from backend_client.spark.task.row_calls import RowCalls
from backend_client.spark.task.rows import row_factory
from backend_client.state.stored_forms import Convert, in_utc

_FRAMES = 500
"""Maximum number of output frames that are converted together: enough to be cheap, few enough to hold in memory."""


def pandas_calls(
    calls: RowCalls,
    batches: Iterable[pa.RecordBatch],
    key_count: int,
    names: Sequence[str],
    output: StructType,
    settings: PandasSettings,
) -> tuple[RowCalls, GroupedFrames, FramesToArrow]:
    """Return the caller of the processor, its input, and the converter of its output."""
    processor = calls.processor
    if '"timestamp' in calls.key_schema:  # with a zone or without
        processor = PandasKeys(processor, calls.key_schema, settings.timezone)
    given = calls.initial
    initial = None if given is None else InitialFrames(given.key_count, given.input_names, given.initial_names)
    to_arrow = FramesToArrow(output, settings)
    return (
        replace(calls, processor=processor, portion=Portion(_FRAMES), initial=initial, take=to_arrow.taken),
        GroupedFrames(batches, key_count, names, settings, initial),
        to_arrow,
    )


class PandasKeys(StatefulProcessor):
    """
    A processor whose keys have timestamps in the session's time zone, without zone info, as in Spark; at any depth.

    Args:
        processor: The user's processor.
        key_schema: The grouping key's schema, as Spark's JSON.
        timezone: The session's time zone.
    """

    def __init__(self, processor: StatefulProcessor, key_schema: str, timezone: str) -> None:
        self._processor = processor
        self._timezone = timezone
        self._shown = _of_stored(json.loads(key_schema), self._clock)

    def init(self, handle: Any) -> None:
        """Pass on."""
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        """Pass on, with pandas timestamps in the key."""
        return self._processor.handleInputRows(tuple(map(self._part, key)), rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Pass on, with Python's timestamps in the key: the same moments of the clock as in the key of the rows."""
        key = key if self._shown is None else self._shown(key)
        # By name, as Spark does: the processor may have them in another order.
        return self._processor.handleExpiredTimer(key=key, timerValues=timerValues, expiredTimerInfo=expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        """Pass on, with pandas timestamps in the key."""
        self._processor.handleInitialState(tuple(map(self._part, key)), initialState, timerValues)

    def close(self) -> None:
        """Pass on."""
        self._processor.close()

    def _clock(self, stored: datetime) -> datetime:
        """Return a stored key's timestamp as the rows' key has it."""
        shown: datetime = self._part(in_utc(stored)).to_pydatetime()
        return shown

    def _part(self, value: Any) -> Any:
        if isinstance(value, dict):  # a struct, such as a window
            return {name: self._part(part) for name, part in value.items()}
        if not isinstance(value, datetime):
            return value
        stamp = pd.Timestamp(value)
        return stamp if stamp.tz is None else stamp.tz_convert(self._timezone).tz_localize(None)


def _of_stored(kind: Any, convert: Convert) -> Convert | None:
    """Return the conversion of all timestamps with a zone in a stored struct; None if there are none."""
    if kind == "timestamp":
        return convert
    if isinstance(kind, str) or kind["type"] != "struct":
        return None
    parts = [_of_stored(field["type"], convert) for field in kind["fields"]]
    if not any(parts):
        return None
    new_row = row_factory([field["name"] for field in kind["fields"]])
    return lambda row: new_row(
        value if part is None or value is None else part(value) for part, value in zip(parts, row, strict=True)
    )
