"""Timers of keys, over batches whose changes reach the table in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backend_client.state.timers import Timers, Upcoming, due_timers
from backend_client.table.state_table import StateTable
from storage.errors import InvalidInputError
from tests.unit.backend_client.state.partition import ANN, BOB, Partition, empty_partition


class Batches(Partition):
    """A partition with timers."""

    def __init__(self, table: StateTable) -> None:
        super().__init__(table)
        self.next()

    def next(self, until_ms: int = 0) -> None:
        """Commit the batch's changes and start the next batch, in which timers up to a time are due."""
        self.timers = Timers(self.next_state(), until_ms)


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    """Return a partition with an empty table."""
    with empty_partition(Batches, tmp_path) as partition:
        yield partition


def test_timers_are_listed_by_time_over_batches(batches: Batches) -> None:
    """A key lists its own timers, stored and new, each time once, those before 1970 first."""
    for moment in (300, -7, 100, 300):
        batches.timers.register(moment)
    batches.at(BOB)
    batches.timers.register(200)
    assert list(batches.timers.timestamps()) == [200]
    batches.next()
    assert list(batches.timers.timestamps()) == [-7, 100, 300]
    batches.timers.register(50)
    batches.timers.delete(100)
    batches.timers.delete(12345)
    assert list(batches.timers.timestamps()) == [-7, 50, 300]
    batches.next()
    assert list(batches.timers.timestamps()) == [-7, 50, 300]


def test_timers_are_listed_when_the_first_is_read(batches: Batches) -> None:
    """As on Spark, what is set after the call and before the first one is read is listed; later changes are not."""
    batches.timers.register(100)
    listed = batches.timers.timestamps()
    batches.timers.register(50)

    assert next(listed) == 50
    batches.timers.register(200)
    batches.timers.delete(100)
    assert list(listed) == [100]


def test_due_timers_are_those_of_the_key_group_up_to_the_moment(batches: Batches) -> None:
    """Due timers are sorted by key and time, include those at the batch's time, and exclude other key groups."""
    for moment in (300, -7, 100):
        batches.timers.register(moment)
    batches.at(BOB)
    batches.timers.register(100)
    batches.timers.register(101)
    batches.at(BOB, key_group=4)
    batches.timers.register(1)
    batches.next()
    assert due_timers(batches.state, 3, 100) == {ANN: [-7, 100], BOB: [100]}
    assert due_timers(batches.state, 3, -8) == {}
    assert due_timers(batches.state, 4, 1) == {BOB: [1]}
    batches.timers.delete(100)
    batches.next()
    assert due_timers(batches.state, 3, 100) == {ANN: [-7], BOB: [100]}


def test_timers_that_are_due_when_they_are_set_fire_once(batches: Batches) -> None:
    """A timer set at or before the batch's time fires in this batch, unless it is deleted first."""
    batches.next(until_ms=100)
    for moment in (101, 100, 50, 60):
        batches.timers.register(moment)
    batches.timers.delete(60)
    assert batches.timers.take_due() == [50, 100]
    assert batches.timers.take_due() == []


def test_moments_of_numpy_are_those_of_python(batches: Batches) -> None:
    """A timer may be set and deleted with one of NumPy's integers, as on Spark; Python's are reported."""
    upcoming = Upcoming()
    timers = Timers(batches.state, 100, upcoming)
    for moment in (101, 100, 60):
        timers.register(np.int64(moment))
    timers.delete(np.int32(60))
    assert list(timers.timestamps()) == [100, 101]
    assert [type(moment) for moment in (upcoming.ms, *timers.take_due())] == [int, int]


@pytest.mark.parametrize("moment", [1 << 63, -(1 << 63) - 1, 1.5, None, "1"])
def test_impossible_moment_is_refused(batches: Batches, moment: object) -> None:
    """Anything but a 64-bit number of milliseconds is an error that says so, and sets nothing."""
    with pytest.raises(InvalidInputError, match="milliseconds since 1970"):
        batches.timers.register(moment)  # type: ignore[arg-type]  # refused whatever it is
    assert batches.state.changes == {}


def test_upcoming_timer_is_the_first_that_is_left(batches: Batches) -> None:
    """The upcoming timer is a stored one after the batch's time, one set for later, or a due one not fired yet."""
    upcoming = Upcoming()
    batches.timers.register(200)
    batches.next()
    assert due_timers(batches.state, 3, 100, upcoming) == {}
    assert upcoming.ms == 200

    timers = Timers(batches.state, 100, upcoming)
    batches.at(ANN)
    timers.register(300)
    assert upcoming.ms == 200
    timers.register(150)
    assert upcoming.ms == 150
    timers.register(50)
    timers.leave_due()
    assert upcoming.ms == 50
