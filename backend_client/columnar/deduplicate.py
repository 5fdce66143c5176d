"""The ready-made processor that passes a key's first row and drops repetitions for a time. No I/O."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend_client.columnar.processor import ColumnarProcessor, KeyBatch, KeyResults, OutputMode
from backend_client.columnar.values import Ints, micros
from backend_client.option_checks import check_column
from backend_client.option_checks import micros as micros_of
from storage.errors import InvalidInputError

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
        check_column("Deduplicate", event_time)
        self.watermark_column = self._event_time = event_time
        self._within_us = micros_of("Deduplicate: within", within)

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
        times = micros(column, np.iinfo(np.int64).min)
        watermark_us = np.iinfo(np.int64).min
        if batch.moment.watermark_ms is not None:
            watermark_us = batch.moment.watermark_ms * 1000
        key_of_row = batch.key_of_row
        order = _order(key_of_row, times)
        on_time = times > watermark_us
        order = order[on_time[order]]
        kept_us = pc.fill_null(batch.state.column(0), 0).to_numpy(zero_copy_only=False).copy()
        keys = key_of_row[order]
        order = order[~batch.has_state[keys] | (times[order] >= kept_us[keys] + self._within_us)]
        keys = key_of_row[order]
        passing = _spaced(keys, times[order], self._within_us)
        passed, changed = np.zeros(len(times), np.bool_), np.zeros(len(kept_us), np.bool_)
        passed[order[passing]] = True
        last = passing[np.diff(keys[passing], append=-1) != 0]
        kept_us[keys[last]] = times[order[last]]
        changed[keys[last]] = True
        return KeyResults(
            state=pa.RecordBatch.from_arrays([pa.array(kept_us)], schema=_STATE),
            output=batch.rows.filter(pa.array(passed)),
            keep=batch.has_state | changed,
            expires_ms=-(-(kept_us + self._within_us) // 1000),
            late_rows=int(np.count_nonzero(~on_time)) - column.null_count,
            changed=changed,
        )


def _order(keys: Ints, times: Ints) -> Ints:
    """Return the order of rows by key and time."""
    first, last = int(times.min(initial=0)), int(times.max(initial=0))
    span = last - first + 1
    if span * (len(keys) + 1) < 1 << 63:  # one number per row is sorted several times as fast
        return np.argsort(keys * span + (times - first))
    return np.lexsort((times, keys))


def _spaced(keys: Ints, times: Ints, distance: int) -> Ints:
    """
    Return the places of each key's first time and then of the next one at least `distance` later, in order.

    The work does not depend on how many times of a key are passed: a key may have most rows of a batch.

    Args:
        keys: The number of each time's key, in order.
        times: The times, those of a key in order.
        distance: Greater than 0.
    """
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(first, append=len(keys))
    if not np.any(times >= np.repeat(times[first], counts) + distance):
        return first
    # Times and their successors' earliest times in one order; a successor's place is the number of times before.
    number = len(keys)
    is_time = np.repeat([False, True], number)
    merged = np.lexsort((is_time, np.concatenate([times + distance, times]), np.tile(keys, 2)))
    places = np.cumsum(is_time[merged])[~is_time[merged]]
    jump = np.full(number + 1, number)
    jump[:-1] = places
    # A place beyond the key's own times is none.
    jump[:-1][places >= np.repeat(first + counts, counts)] = number
    found = np.zeros(number + 1, np.bool_)
    found[first] = True
    while np.any(jump[:-1][found[:-1]] < number):
        # Twice as many steps from the first times as in the round before.
        found[jump[found]] = True
        jump = jump[jump]
    return np.flatnonzero(found[:-1])
