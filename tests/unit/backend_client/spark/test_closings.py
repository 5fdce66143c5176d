"""The watermarks at which batches are closed, if a driver dies between their output and their checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from backend_client.batch_time import BatchTime
from backend_client.spark.driver import batch_times
from backend_client.spark.driver.batch_times import BatchTimes
from backend_client.spark.driver.closings import Closings
from backend_client.spark.private.stream_plan import StreamPlan
from dstl_service.wire import CheckpointRef
from tests.unit.backend_client.spark.test_stream_plan import Node, stream_plan, watermarked

TIME = BatchTime(timestamp_ms=5, watermark_ms=100, previous_watermark_ms=90)
BASE = CheckpointRef(6, 0, "base")


class Log:
    """A Spark checkpoint's note, and how often it was written."""

    def __init__(self) -> None:
        self.noted: dict[tuple[int, str], tuple[int | None]] = {}
        self.delay_ms: int | None = None
        self.writes = 0

    def closed(self, batch_id: int, base: str) -> tuple[int | None] | None:
        return self.noted.get((batch_id, base))

    def note_closed(self, batch_id: int, base: str, closed_ms: int | None) -> int | None:
        self.writes += 1
        return self.noted.setdefault((batch_id, base), (closed_ms,))[0]

    def closing_delay(self) -> int | None:
        return self.delay_ms

    def note_closing_delay(self, delay_ms: int) -> None:
        self.delay_ms = delay_ms
        self.writes += 1


def closings(log: Log, plan: StreamPlan, first: int, *, is_seen_early: bool = True) -> Closings:
    """Return those of a driver before whose start Spark had planned the batches before `first`."""
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda _: "true"))
    there: Any = log
    with mock.patch.object(batch_times, "StreamPlan", return_value=plan):
        times = BatchTimes(spark, lambda: "id", [])
    return Closings(times, there, first, is_seen_early=is_seen_early)


def of_two(watermark_ms: int, keeps_back_ms: int | None = None) -> StreamPlan:
    """Return the plan of a query with two inputs, whose tracker says a watermark."""
    return stream_plan(Node("Union", watermarked(), watermarked(), keeps_back_ms=keeps_back_ms), watermark_ms)


def test_a_batch_is_closed_at_the_same_watermark_again() -> None:
    """
    I14: what is seen of it stays all that it emits.

    Spark's tracker may know less in the next driver, where an input without rows in the batch holds the watermark up,
    or more, by a shorter delay.
    """
    log = Log()
    assert closings(log, of_two(130), 7).closed_ms(7, BASE, TIME) == (130, 130)
    assert closings(log, of_two(0), 8).closed_ms(7, BASE, TIME) == (130, 130)
    assert closings(log, of_two(150), 8).closed_ms(7, BASE, TIME) == (130, 130)
    assert closings(log, of_one(5, 150), 8).closed_ms(7, BASE, TIME) == (130, 130), "one input was removed meanwhile"
    assert closings(log, of_two(0), 8).closed_ms(7, None, TIME) == (100, 100), "another branch"
    assert closings(log, of_two(140), 8).closed_ms(8, BASE, TIME) == (140, 140), "the next batch"


def test_a_driver_that_was_suspended_closes_its_batch_as_its_successor() -> None:
    """I14: it is fenced at its checkpoint only, so its output may be seen first, or its note be read by a third one."""
    log = Log()
    suspended = closings(log, of_two(130), 7)
    assert closings(log, of_two(0), 8).closed_ms(7, BASE, TIME) == (100, 100)
    assert suspended.closed_ms(7, BASE, TIME) == (100, 100)
    assert closings(log, of_two(0), 8).closed_ms(7, BASE, TIME) == (100, 100)


def of_one(delay_ms: int, newest_ms: int) -> StreamPlan:
    """Return the plan of a query with one input, whose newest row has this time."""
    return stream_plan(watermarked(delay_ms, [newest_ms]), newest_ms - delay_ms)


def test_a_changed_delay_does_not_hold_for_the_batch_that_is_executed_again() -> None:
    """I14: it holds from the next one on, and only then it is noted, so also a third driver closes it as the first."""
    log = Log()
    first = closings(log, of_one(20, 150), 7)
    assert first.closed_ms(7, BASE, TIME) == (130, 130)
    assert first.closed_ms(8, BASE, TIME) == (130, 130)
    assert log.writes == 1, "nothing is noted of a batch whose watermark follows from its rows"
    for _ in range(2):
        assert closings(log, of_one(5, 150), 9).closed_ms(8, BASE, TIME) == (130, 130)
    after = closings(log, of_one(5, 150), 9)
    assert after.closed_ms(8, BASE, TIME) == (130, 130)
    assert after.closed_ms(9, BASE, TIME) == (145, 145)
    assert closings(log, of_one(5, 150), 10).closed_ms(9, BASE, TIME) == (145, 145)
    assert log.writes == 2


def test_the_delay_of_the_first_batch_is_noted_when_it_is_executed_again() -> None:
    """I14: its first driver may have died before it noted anything; a third one must close it as the second."""
    log = Log()
    assert closings(log, of_one(20, 150), 8).closed_ms(7, BASE, TIME) == (130, 130)
    assert closings(log, of_one(5, 150), 8).closed_ms(7, BASE, TIME) == (130, 130)


NONE = stream_plan(Node("Scan"), 0)


@pytest.mark.parametrize(("plan", "is_seen_early"), [(of_two(130), False), (NONE, True), (stream_plan(None), True)])
def test_nothing_is_noted_where_nothing_differs(plan: StreamPlan, *, is_seen_early: bool) -> None:
    """Without a watermark no batch is closed by one; output of a sink is seen with its checkpoint only."""
    log = Log()
    closings(log, plan, 7, is_seen_early=is_seen_early).closed_ms(7, BASE, TIME)
    assert log.writes == 0
