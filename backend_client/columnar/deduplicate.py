"""The ready-made processor that passes a key's first row and drops repetitions for a time. No I/O."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.processor import ColumnarProcessor, KeyBatch, KeyResults, OutputMode
from backend_client.columnar.reductions import Groups
from storage.errors import InvalidInputError

_MICROSECOND = timedelta(microseconds=1)
_STATE = pa.schema([pa.field("kept_us", pa.int64())])


class Deduplicate(ColumnarProcessor):
    """
    Passes one row of each key, then the next one whose event time is at least `within` later.

    A row that arrives later but is older than the passed one is a repetition, too. Rows whose time is not after the
    watermark are dropped, as in Spark's ``dropDuplicatesWithinWatermark``; here rows whose time is null are, too. State
    ends when the watermark reaches the end of `within`. Output: the input's columns.

    Args:
        event_time: A timestamp column.
        within: How long rows of the same key count as repetitions, by event time.
    """

    expires = True

    def __init__(self, event_time: str, within: timedelta) -> None:
        self.watermark_column = self._event_time = event_time
        self._within_us = within // _MICROSECOND

    def check(self, rows: pa.Schema, output_mode: OutputMode) -> None:
        """Refuse a column that is not a timestamp, and a `within` that is not positive."""
        if self._event_time not in rows.names or not pa.types.is_timestamp(rows.field(self._event_time).type):
            raise InvalidInputError(
                f"Deduplicate needs a timestamp column; the input has none named {self._event_time!r}"
            )
        if self._within_us <= 0:
            raise InvalidInputError("Deduplicate: within must be positive")

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the time of the passed row."""
        return _STATE

    def output_schema(self, keys: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """Return the input's columns."""
        return rows

    def process(self, batch: KeyBatch) -> KeyResults:
        """Pass the first rows, drop repetitions."""
        column = batch.rows.column(self._event_time)
        micros = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
        times = pc.fill_null(micros, np.iinfo(np.int64).min).to_numpy(zero_copy_only=False)
        watermark_us = np.iinfo(np.int64).min
        if batch.moment.watermark_ms is not None:
            watermark_us = batch.moment.watermark_ms * 1000
        key_of_row = Groups(batch.starts, len(times)).of_rows
        order = np.lexsort((times, key_of_row))
        on_time = times > watermark_us
        order = order[on_time[order]]
        kept_us = pc.fill_null(batch.state.column(0), 0).to_numpy(zero_copy_only=False).copy()
        known = batch.has_state.copy()
        passed, changed = np.zeros(len(times), np.bool_), np.zeros(len(known), np.bool_)
        while len(order):
            # Each round passes each key's first row that repeats no passed one, until no key has any.
            keys = key_of_row[order]
            order = order[~known[keys] | (times[order] >= kept_us[keys] + self._within_us)]
            first = order[np.diff(key_of_row[order], prepend=-1) != 0]
            passed[first] = True
            kept_us[key_of_row[first]] = times[first]
            known[key_of_row[first]] = changed[key_of_row[first]] = True
        return KeyResults(
            state=pa.RecordBatch.from_arrays([pa.array(kept_us)], schema=_STATE),
            output=batch.rows.filter(pa.array(passed)),
            keep=known,
            expires_ms=-(-(kept_us + self._within_us) // 1000),
            late_rows=int(np.count_nonzero(~on_time)) - column.null_count,
            changed=changed,
        )
