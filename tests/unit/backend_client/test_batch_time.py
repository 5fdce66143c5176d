"""Times of a batch in Spark's offsets entries."""

from __future__ import annotations

import json

import pytest

from backend_client.batch_time import BatchTime, TimeMode
from storage.errors import CorruptDataError, InvalidInputError


def entry(watermark_ms: int, timestamp_ms: int = 5) -> str:
    """Return an offsets entry as Spark writes it."""
    metadata = {"batchWatermarkMs": watermark_ms, "batchTimestampMs": timestamp_ms, "conf": {}}
    return f'v1\n{json.dumps(metadata)}\n{{"logOffset":0}}'


def test_times_are_those_that_spark_wrote() -> None:
    """A batch has the watermark and the processing time of its entry, and the watermark of the batch before."""
    assert BatchTime.read(entry(200, 1000), entry(100)) == BatchTime(1000, 200, 100)
    assert BatchTime.read(entry(0, 1000), None) == BatchTime(1000, 0, 0)


def test_damaged_entry_is_refused() -> None:
    """An entry without times is an error, not time zero."""
    for text in ("", "v1", "v1\nno json", "v1\n[]", "v1\n{}", 'v1\n{"batchWatermarkMs": null, "batchTimestampMs": 1}'):
        with pytest.raises(CorruptDataError, match="does not hold the batch's time"):
            BatchTime.read(text, None)


def test_modes_are_read_in_any_case() -> None:
    """Spark's names of time modes are accepted in any case; others are refused with the valid ones."""
    assert [TimeMode.of(text) for text in ("none", "EVENTTIME", "processingTime")] == [
        TimeMode.NONE,
        TimeMode.EVENT,
        TimeMode.PROCESSING,
    ]
    with pytest.raises(InvalidInputError, match="'EventTime', not 'Eventime'"):
        TimeMode.of("Eventime")


def test_timers_are_due_by_their_clock() -> None:
    """By event time, timers are due up to the batch's watermark; by processing time, up to its start."""
    assert [BatchTime(1000, 200, 100).due_until(mode) for mode in TimeMode] == [None, 1000, 200]


def test_closed_batch_takes_the_place_of_the_one_before() -> None:
    """After a closed batch, late rows and fired timers are determined by the watermark it was closed at."""
    assert BatchTime.read(entry(200, 1000), entry(100), 200) == BatchTime(1000, 200, 200)
    assert BatchTime.read(entry(150, 1000), entry(100), 200) == BatchTime(1000, 200, 200)
