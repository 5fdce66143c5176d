"""The watermarks at which batches are closed, if a driver dies between their output and their checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass
class Log:
    """The notes in a Spark checkpoint: the watermark, the delay and the epoch of each batch."""

    noted: dict[tuple[int, str], tuple[int | None, int | None, int]] = field(default_factory=dict)

    def note_closed(
        self, batch_id: int, base: str, closed_ms: int | None, delay_ms: int | None, epoch: int
    ) -> int | None:
        return self.noted.setdefault((batch_id, base), (closed_ms, delay_ms, epoch))[0]

    def closing_delay(self, batch_id: int) -> int | None:
        notes = [note for (batch, _), note in self.noted.items() if batch < batch_id]
        return max(notes, key=lambda note: note[2])[1] if notes else None


class Driver:
    """A driver before whose start Spark had planned the batches before `first`."""

    def __init__(self, log: Log, plan: StreamPlan, first: int, epoch: int = 1, *, is_seen_early: bool = True) -> None:
        spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda _: "true"))
        there: Any = log
        with mock.patch.object(batch_times, "StreamPlan", return_value=plan):
            times = BatchTimes(spark, lambda: "id", [])
        self._closings = Closings(times, there, first, is_seen_early=is_seen_early)
        self._epoch = epoch

    def closed_ms(self, batch_id: int, base: CheckpointRef | None = BASE) -> tuple[int | None, int | None]:
        """Close a batch."""
        return self._closings.closed_ms(batch_id, base, TIME, self._epoch)


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
    assert Driver(log, of_two(130), 7).closed_ms(7) == (130, 130)
    assert Driver(log, of_two(0), 8).closed_ms(7) == (130, 130)
    assert Driver(log, of_two(150), 8).closed_ms(7) == (130, 130)
    assert Driver(log, of_one(5, 150), 8).closed_ms(7) == (130, 130), "one input was removed meanwhile"
    assert Driver(log, of_two(0), 8).closed_ms(7, None) == (100, 100), "another branch"
    assert Driver(log, of_two(140), 8).closed_ms(8) == (140, 140), "the next batch"


def test_a_driver_that_was_suspended_closes_its_batch_as_its_successor() -> None:
    """I14: it is fenced at its checkpoint only, so its output may be seen first, or its note be read by a third one."""
    log = Log()
    suspended = Driver(log, of_two(130), 7)
    assert Driver(log, of_two(0), 8).closed_ms(7) == (100, 100)
    assert suspended.closed_ms(7) == (100, 100)
    assert Driver(log, of_two(0), 8).closed_ms(7) == (100, 100)


def of_one(delay_ms: int, newest_ms: int) -> StreamPlan:
    """Return the plan of a query with one input, whose newest row has this time."""
    return stream_plan(watermarked(delay_ms, [newest_ms]), newest_ms - delay_ms)


def test_a_changed_delay_does_not_hold_for_the_batch_that_is_executed_again() -> None:
    """I14: it holds from the next one on, and a third driver closes the batch as the first."""
    log = Log()
    first = Driver(log, of_one(20, 150), 7, 1)
    assert first.closed_ms(7) == (130, 130)
    assert first.closed_ms(8) == (130, 130)
    assert len(log.noted) == 1, "nothing is noted of a batch whose watermark follows from its rows"
    for epoch in (2, 3):
        assert Driver(log, of_one(5, 150), 9, epoch).closed_ms(8) == (130, 130)
    after = Driver(log, of_one(5, 150), 9, 4)
    assert after.closed_ms(8) == (130, 130)
    assert after.closed_ms(9) == (145, 145)
    assert after.closed_ms(10) == (145, 145)
    assert sorted(batch for batch, _ in log.noted) == [7, 8, 9]
    assert Driver(log, of_one(20, 150), 11, 5).closed_ms(10) == (145, 145)


def test_the_delay_of_the_first_batch_is_noted_when_it_is_executed_again() -> None:
    """I14: its first driver may have died before it noted anything; a third one must close it as the second."""
    log = Log()
    assert Driver(log, of_one(20, 150), 8).closed_ms(7) == (130, 130)
    assert Driver(log, of_one(5, 150), 8).closed_ms(7) == (130, 130)


def test_a_new_delay_of_a_suspended_driver_holds_for_nothing_that_its_successor_executed() -> None:
    """I14: it planned a batch, and continues when its successor has executed that one and others with its own delay."""
    log = Log()
    assert Driver(log, of_one(20, 150), 7, 1).closed_ms(7) == (130, 130)
    suspended = Driver(log, of_one(5, 150), 8, 2)
    successor = Driver(log, of_one(20, 150), 9, 3)
    assert successor.closed_ms(8) == (130, 130)
    assert suspended.closed_ms(8) == (130, 130), "the sink may have the output of either"
    assert [successor.closed_ms(batch) for batch in (9, 10)] == [(130, 130)] * 2
    assert suspended.closed_ms(8) == (130, 130)
    assert Driver(log, of_one(5, 150), 11, 4).closed_ms(10) == (130, 130)


def test_a_late_note_of_a_suspended_driver_is_older_than_what_came_after_a_rewind() -> None:
    """I14: its batch has a higher number than the next driver's first one, but its epoch is lower."""
    log = Log()
    suspended = Driver(log, of_one(5, 150), 9, 1)
    assert Driver(log, of_one(20, 150), 4, 2).closed_ms(4) == (130, 130)
    suspended.closed_ms(9)
    assert Driver(log, of_one(5, 150), 11, 3).closed_ms(10, CheckpointRef(9, 0, "after the rewind")) == (130, 130)


NONE = stream_plan(Node("Scan"), 0)


@pytest.mark.parametrize(("plan", "is_seen_early"), [(of_two(130), False), (NONE, True), (stream_plan(None), True)])
def test_nothing_is_noted_where_nothing_differs(plan: StreamPlan, *, is_seen_early: bool) -> None:
    """Without a watermark no batch is closed by one; output of a sink is seen with its checkpoint only."""
    log = Log()
    Driver(log, plan, 7, is_seen_early=is_seen_early).closed_ms(7)
    assert not log.noted
