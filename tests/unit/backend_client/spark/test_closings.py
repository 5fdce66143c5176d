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
    """The notes in a Spark checkpoint, by batch, base and epoch: the watermark and the delay of later batches."""

    noted: dict[tuple[int, str, int], tuple[int | None, int | None]] = field(default_factory=dict)

    def note_closed(
        self, batch_id: int, base: str, closed_ms: int | None, delay_ms: int | None, epoch: int
    ) -> int | None:
        there = {note[2]: noted[0] for note, noted in self.noted.items() if note[:2] == (batch_id, base)}
        closed_ms = there[max(there)] if there else closed_ms
        self.noted[batch_id, base, epoch] = closed_ms, delay_ms
        return closed_ms

    def closing_delay(self, batch_id: int) -> int | None:
        notes = [(note[2], note[0], noted[1]) for note, noted in self.noted.items() if note[0] < batch_id]
        return max(notes)[2] if notes else None


class Driver:
    """A driver of an epoch."""

    def __init__(self, log: Log, plan: StreamPlan, epoch: int = 1, *, is_seen_early: bool = True) -> None:
        spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda _: "true"))
        there: Any = log
        with mock.patch.object(batch_times, "StreamPlan", return_value=plan):
            times = BatchTimes(spark, lambda: "id", [])
        self._closings = Closings(times, there, is_seen_early=is_seen_early)
        self._epoch = epoch

    def closed_ms(self, batch_id: int, base: CheckpointRef | None = BASE) -> tuple[int | None, int | None]:
        """Close a batch."""
        return self._closings.closed_ms(batch_id, base, TIME, self._epoch)

    def needs_owner(self) -> bool:
        """Return whether it must ask whether the job is still its own before it emits the last batch."""
        return self._closings.needs_owner


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
    assert Driver(log, of_two(130), 1).closed_ms(7) == (130, 130)
    assert Driver(log, of_two(0), 2).closed_ms(7) == (130, 130)
    assert Driver(log, of_two(150), 3).closed_ms(7) == (130, 130)
    assert Driver(log, of_one(5, 150), 4).closed_ms(7) == (130, 130), "one input was removed meanwhile"
    assert Driver(log, of_two(0), 5).closed_ms(7, None) == (100, 100), "another branch"
    assert Driver(log, of_two(140), 6).closed_ms(8) == (140, 140), "the next batch"


def test_a_driver_that_was_suspended_closes_its_batch_as_its_successor() -> None:
    """I14: where another coordinator serves it, it is fenced at its checkpoint only; its output may be seen first."""
    log = Log()
    suspended = Driver(log, of_two(130), 1)
    assert Driver(log, of_two(0), 2).closed_ms(7) == (100, 100)
    assert suspended.closed_ms(7) == (100, 100)
    assert suspended.needs_owner()
    assert Driver(log, of_two(0), 3).closed_ms(7) == (100, 100)


def of_one(delay_ms: int, newest_ms: int) -> StreamPlan:
    """Return the plan of a query with one input, whose newest row has this time."""
    return stream_plan(watermarked(delay_ms, [newest_ms]), newest_ms - delay_ms)


def test_a_changed_delay_does_not_hold_for_the_batch_that_is_executed_again() -> None:
    """I14: it holds from the next one on, and a third driver closes the batch as the first."""
    log = Log()
    first = Driver(log, of_one(20, 150), 1)
    assert first.closed_ms(7) == (130, 130)
    assert first.needs_owner()
    assert first.closed_ms(8) == (130, 130)
    assert not first.needs_owner()
    assert len(log.noted) == 1, "nothing is noted of a batch whose watermark follows from its rows"
    for epoch in (2, 3):
        assert Driver(log, of_one(5, 150), epoch).closed_ms(8) == (130, 130)
    after = Driver(log, of_one(5, 150), 4)
    assert [after.closed_ms(8) for _ in range(2)] == [(130, 130)] * 2, "a second try"
    assert after.closed_ms(9) == (145, 145)
    assert Driver(log, of_one(20, 150), 5).closed_ms(9) == (145, 145)


def test_a_changed_delay_holds_where_each_driver_has_one_batch() -> None:
    """From the second one on."""
    log = Log()
    delays = (20, 5, 5)
    closed = [Driver(log, of_one(delay, 150), epoch).closed_ms(epoch)[0] for epoch, delay in enumerate(delays)]
    assert closed == [130, 130, 145]


def test_a_batch_that_a_driver_planned_while_its_successor_started_is_closed_by_its_delay() -> None:
    """I14: it was idle, and another coordinator serves its successor, which finds a batch that was not there."""
    log = Log()
    idle, successor = Driver(log, of_one(20, 150), 1), Driver(log, of_one(5, 150), 2)
    assert [idle.closed_ms(batch) for batch in (7, 8)] == [(130, 130)] * 2
    assert successor.closed_ms(8) == (130, 130)
    assert successor.closed_ms(9) == (145, 145)


def test_the_delay_of_the_first_batch_is_noted_when_it_is_executed_again() -> None:
    """I14: its first driver may have died before it noted anything; a third one must close it as the second."""
    log = Log()
    assert Driver(log, of_one(20, 150), 1).closed_ms(7) == (130, 130)
    assert Driver(log, of_one(5, 150), 2).closed_ms(7) == (130, 130)


def test_a_new_delay_of_a_suspended_driver_holds_for_nothing_that_its_successor_executed() -> None:
    """I14: it planned a batch, and continues when its successor has executed that one and others with its own delay."""
    log = Log()
    assert Driver(log, of_one(20, 150), 1).closed_ms(7) == (130, 130)
    suspended = Driver(log, of_one(5, 150), 2)
    successor = Driver(log, of_one(20, 150), 3)
    assert successor.closed_ms(8) == (130, 130)
    assert suspended.closed_ms(8) == (130, 130), "the sink may have the output of either"
    assert [successor.closed_ms(batch) for batch in (9, 10)] == [(130, 130)] * 2
    assert suspended.closed_ms(8) == (130, 130)
    assert Driver(log, of_one(5, 150), 4).closed_ms(10) == (130, 130)


NONE = stream_plan(Node("Scan"), 0)


@pytest.mark.parametrize(("plan", "is_seen_early"), [(of_two(130), False), (NONE, True), (stream_plan(None), True)])
def test_nothing_is_noted_where_nothing_differs(plan: StreamPlan, *, is_seen_early: bool) -> None:
    """Without a watermark no batch is closed by one; output of a sink is seen with its checkpoint only."""
    log = Log()
    driver = Driver(log, plan, is_seen_early=is_seen_early)
    driver.closed_ms(7)
    assert not log.noted
    assert not driver.needs_owner()
