"""Which column has the event time, and how late rows are removed from batches."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType, TimestampNTZType, TimestampType

from backend_client.spark.event_time import DELAY_KEY, EventTime, event_time_of, mark_event_time
from backend_client.spark.task.late_rows import LateRowFilter
from storage.errors import InvalidInputError

MOMENT = StructType().add("k", StringType()).add("my `t`", TimestampType(), True, {DELAY_KEY: 7})
WINDOW = StructType().add(
    "w", StructType().add("start", TimestampNTZType()).add("end", TimestampNTZType()), True, {DELAY_KEY: 7}
)


def test_event_time_is_the_column_with_a_watermark() -> None:
    """Spark's metadata marks the column, a window counts by its end; without a watermark there is no such column."""
    assert event_time_of(MOMENT, "op") == EventTime("`my ``t```", has_zone=True)
    assert event_time_of(WINDOW, "op") == EventTime("`w`.end", has_zone=False)
    assert event_time_of(StructType().add("t", TimestampType()), "op") is None
    with pytest.raises(InvalidInputError, match="several columns with a watermark: my `t`, w; drop"):
        event_time_of(StructType([*MOMENT.fields, *WINDOW.fields]), "op")


def test_moments_are_compared_as_spark_counts_them() -> None:
    """A timestamp without a zone counts as UTC; a row without a time is neither before nor after a time."""
    assert EventTime("t", has_zone=True).until(5) == "coalesce(t <= timestamp_millis(5), false)"
    assert (
        EventTime("t", has_zone=False).until(86_400_000) == "coalesce(t <= timestamp_ntz'1970-01-02 00:00:00', false)"
    )


def test_output_column_takes_the_delay_over() -> None:
    """An output's event-time column takes over the delay of the input's watermark; the given schema is unchanged."""
    output = StructType().add("k", StringType()).add("at", TimestampType())
    marked = mark_event_time(output, "at", MOMENT)
    assert marked["at"].metadata == {DELAY_KEY: 7}
    assert event_time_of(marked, "op") == EventTime("`at`", has_zone=True)
    assert event_time_of(output, "op") is None


def test_impossible_output_column_is_refused() -> None:
    """A missing column, or one without times, cannot be the event time."""
    output = StructType().add("k", StringType()).add("n", LongType())
    with pytest.raises(InvalidInputError, match="'t' is not a column of the output; it has k, n"):
        mark_event_time(output, "t", MOMENT)
    with pytest.raises(InvalidInputError, match="'n' must be a timestamp, not bigint"):
        mark_event_time(output, "n", MOMENT)


def test_late_rows_are_dropped_and_counted() -> None:
    """Rows with negative key groups come first, over several batches; the other rows pass unchanged."""

    def batch(*key_groups: int) -> pa.RecordBatch:
        return pa.record_batch({"key_group": list(key_groups)})

    on_time = LateRowFilter([batch(-7, -1), batch(), batch(-1, 0, 3), batch(3, 4)])
    assert [part.column(0).to_pylist() for part in on_time if part.num_rows] == [[0, 3], [3, 4]]
    assert on_time.late_rows == 3
