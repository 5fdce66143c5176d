"""The log lines of a long restore."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dstl_service.restore.progress import TOLD_EVERY_MS, RestoreProgress
from dstl_service.restore.table_id import TableId
from storage.key_groups import KeyGroupRange
from storage.testing import FakeClock

MB = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    """A clock that the test moves."""
    return FakeClock()


@pytest.fixture
def counted() -> list[int]:
    """The values passed to the metrics."""
    return []


@pytest.fixture
def progress(clock: FakeClock, counted: list[int], caplog: pytest.LogCaptureFixture) -> RestoreProgress:
    """The progress of a table of 100 MB."""
    caplog.set_level(logging.INFO, "dstl_service")
    return RestoreProgress(TableId("job", "totals", KeyGroupRange(0, 31)), 100 * MB, counted.append, clock)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Any]]:
    """Return the events with the seconds left."""
    return [(record.message, getattr(record, "left_s", None)) for record in caplog.records]


def test_short_restore_logs_nothing(
    progress: RestoreProgress, clock: FakeClock, counted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Most restores are a batch's change set: they only count."""
    for _ in range(100):
        clock.advance((TOLD_EVERY_MS - 100) // 100)
        progress.sent(MB)
    progress.ended()

    assert counted == [MB] * 100
    assert told(caplog) == []


def test_long_restore_tells_how_long_it_will_take(
    progress: RestoreProgress, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A quarter in ten seconds leaves thirty; at the end it says that it is done."""
    for _ in range(100):
        clock.advance(TOLD_EVERY_MS // 25)
        progress.sent(MB)
    progress.ended()

    assert told(caplog) == [
        ("restore under way", 30),
        ("restore under way", 20),
        ("restore under way", 10),
        ("restore under way", 0),
        ("restore done", None),
    ]
    first: Any = caplog.records[0]
    assert (first.job, first.operator, first.key_groups) == ("job", "totals", "00000-00031")
    assert (first.sent_bytes, first.size_bytes, first.elapsed_s) == (25 * MB, 100 * MB, 10)


def test_table_that_is_larger_than_planned_has_no_time_below_zero(
    progress: RestoreProgress, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan's size is an estimate where a snapshot's files are shared."""
    clock.advance(TOLD_EVERY_MS)
    progress.sent(200 * MB)

    assert told(caplog) == [("restore under way", 0)]
