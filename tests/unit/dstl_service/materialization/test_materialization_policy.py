"""When a table is to be materialized."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from dstl_service.materialization.policy import MaterializationSettings, Schedule, Trigger
from storage.errors import InvalidInputError

RATE = 1000.0
S = 1000
"""Milliseconds in a second."""


def schedule(chance: float = 1.0, **changes: Any) -> Schedule:
    """Return a schedule that was begun at time 0, with an interval of 100 s and high limits."""
    values = {"interval_s": 100, "log_ratio": 2.0, "log_floor_bytes": 1000, "replay_s_max": 1_000_000, **changes}
    return Schedule(MaterializationSettings(**values), 0, chance)


@pytest.mark.parametrize("chance", [0.0, 0.3, 1.0])
def test_first_time_lies_within_interval(chance: float) -> None:
    """I13: the first time trigger is at a random part of the interval, so that tables do not coincide."""
    made = schedule(chance)
    made.logged(1, 10)
    due_ms = int(100 * S * chance)

    assert due_ms == 0 or made.ask(due_ms - 1, RATE) is None
    assert made.ask(due_ms, RATE) is Trigger.TIME


def test_interval_passes_between_two() -> None:
    """I13: after a success the next snapshot is due an interval later, counted from its end."""
    made = schedule(0.0)
    made.logged(1, 10)
    assert made.ask(0, RATE) is Trigger.TIME
    made.begin(1, 1)
    made.logged(2, 10)
    made.completed(30 * S, 500)

    assert made.ask(130 * S - 1, RATE) is None
    assert made.ask(130 * S, RATE) is Trigger.TIME


def test_unchanged_table_is_skipped() -> None:
    """A table without new log is not materialized; it counts as skipped, never as completed."""
    made = schedule(0.0)

    assert made.ask(0, RATE) is None
    assert (made.skipped, made.since_success_s(S)) == (1, 1)
    made.logged(1, 10)
    assert made.ask(100 * S - 1, RATE) is None
    assert made.ask(100 * S, RATE) is Trigger.TIME


def test_large_log_comes_sooner() -> None:
    """I13: a log above its floor and above the ratio of the table's size makes the table due at once."""
    made = schedule()
    made.logged(1, 1000)
    assert made.ask(1, RATE) is None
    made.logged(2, 1)
    assert made.ask(1, RATE) is Trigger.LOG_SIZE
    made.begin(1, 2)
    made.completed(2, 5000)
    made.logged(3, 10_000)

    assert made.ask(3, RATE) is None
    made.logged(4, 1)
    assert made.ask(3, RATE) is Trigger.LOG_SIZE


def test_long_replay_comes_sooner() -> None:
    """I13: however large the table, a log that takes too long to apply makes it due; the measured rate decides."""
    made = schedule(replay_s_max=10, log_floor_bytes=10**9)
    made.logged(1, 20_000)

    assert made.ask(1, 2000.0) is None
    assert made.ask(1, 1999.0) is Trigger.REPLAY_TIME


def test_log_counts_once() -> None:
    """The log of a checkpoint counts once, however many attempts restore it."""
    made = schedule()
    for checkpoint_id in (1, 2, 1, 2, 2):
        made.logged(checkpoint_id, 100)

    assert made.log_bytes == 200


def test_log_since_snapshot_stays() -> None:
    """Changes logged while a snapshot is stored are not in it, and count towards the next."""
    made = schedule()
    made.logged(1, 100)
    made.begin(0, 1)
    made.logged(2, 7)
    assert made.log_bytes == 107
    made.completed(1, 50)

    assert (made.log_bytes, made.table_bytes) == (7, 50)


def test_failed_snapshot_keeps_whole_log() -> None:
    """After a failure the log is as long as if nothing had been tried."""
    made = schedule()
    made.logged(1, 100)
    made.begin(0, 1)
    made.logged(2, 7)
    made.failed(1)

    assert (made.log_bytes, made.is_running) == (107, False)


def test_log_of_untaken_snapshot_counts_again() -> None:
    """I13: a stored snapshot that no checkpoint named truncated no log: all of it counts, and a retry is due soon."""
    made = schedule(0.0)
    made.logged(1, 100)
    made.begin(0, 1)
    made.completed(0, 50)
    made.logged(2, 7)

    assert not made.untaken(50 * S)
    assert (made.log_bytes, made.failures) == (107, 1)
    assert made.ask(60 * S - 1, RATE) is None
    assert made.ask(60 * S, RATE) is Trigger.TIME


def test_log_of_named_snapshot_counts_no_more() -> None:
    """Log that a named snapshot truncated stays truncated, whatever happens to the next snapshot."""
    made = schedule(0.0)
    for checkpoint_id in (1, 2):
        made.logged(checkpoint_id, 10 * checkpoint_id)
        made.begin(0, checkpoint_id)
        made.completed(0, 50)
        if checkpoint_id == 1:
            made.named()
    made.untaken(S)

    assert made.log_bytes == 20


def test_log_that_is_seen_after_its_snapshot_is_not_due() -> None:
    """A process that received a snapshot before it saw the table's log requests no second one."""
    made = schedule(log_floor_bytes=0, log_ratio=0.0)
    made.begin(0, 2)
    made.completed(0, 50)
    made.logged(2, 100)
    assert (made.log_bytes, made.ask(1, RATE)) == (0, None)
    made.logged(3, 7)
    assert made.log_bytes == 7

    made.untaken(S)
    assert made.log_bytes == 107


def test_untaken_snapshot_ends_no_other() -> None:
    """I13: a snapshot that runs while an earlier one proves untaken continues, and covers the log of both."""
    made = schedule(0.0)
    made.logged(1, 100)
    made.begin(0, 1)
    made.completed(0, 50)
    made.logged(2, 7)
    made.begin(0, 2)
    made.logged(3, 5)

    assert not made.untaken(50 * S)
    assert (made.is_running, made.failures, made.log_bytes) == (True, 0, 112)
    made.completed(60 * S, 50)
    assert made.log_bytes == 5


def test_one_at_a_time() -> None:
    """No second snapshot is requested while one is requested or runs; triggers meanwhile count as skipped."""
    made = schedule(0.0)
    made.logged(1, 10)
    assert made.ask(0, RATE) is Trigger.TIME
    assert made.ask(0, RATE) is None
    made.begin(0, 1)

    assert made.ask(250 * S, RATE) is None
    assert made.skipped == 3
    assert made.running_s(250 * S) == 250


def test_failure_is_repeated_sooner() -> None:
    """I13: after a failure the retry is well before an interval, after more failures a little later each time."""
    made = schedule(0.0)
    made.logged(1, 10**6)
    made.ask(0, RATE)
    now_ms, waits = 0, []
    for _ in range(5):
        made.begin(now_ms, 1)
        failed_ms = now_ms
        made.failed(now_ms)
        while made.ask(now_ms, RATE) is None:
            now_ms += S
        waits.append((now_ms - failed_ms) // S)

    assert waits == [10, 20, 40, 50, 50]


def test_three_failures_are_reported() -> None:
    """The third failure in a row is reported; a success in between resets the count."""
    made = schedule()

    assert [made.failed(0) for _ in range(6)] == [False, False, True, False, False, True]
    made.begin(0, 1)
    made.completed(0, 1)
    assert made.failures == 0
    assert not made.failed(0)


def test_unanswered_request_is_seen() -> None:
    """A request that a task does not answer within half a minute is a failure, and does not block for ever."""
    made = schedule(0.0)
    made.logged(1, 10)
    made.ask(0, RATE)

    assert not made.is_unanswered(29_999)
    assert made.is_unanswered(30_000)
    made.failed(30_000)
    assert not made.is_unanswered(60_000)
    assert made.ask(40_000, RATE) is Trigger.TIME


def test_stuck_one_is_visible() -> None:
    """The time since the last success grows while a snapshot is stuck, from the table's first restore on."""
    made = schedule()
    assert made.since_success_s(70 * S) == 70
    made.begin(80 * S, 1)
    assert made.since_success_s(90 * S) == 90
    made.completed(95 * S, 1)

    assert made.since_success_s(100 * S) == 5


def test_table_that_left_is_stale() -> None:
    """A table that nobody restored during an interval has left this host, unless its snapshot is being stored."""
    made = schedule()
    made.ask(10 * S, RATE)

    assert not made.is_stale(110 * S)
    assert made.is_stale(110 * S + 1)
    made.begin(110 * S, 1)
    assert not made.is_stale(500 * S)


def test_table_of_rare_batches_is_not_stale() -> None:
    """A table stays in the metrics between batches further apart than intervals, and is removed when they end."""
    made = schedule()
    for batch in range(4):
        assert batch < 2 or not made.is_stale(300 * S * batch)
        made.ask(300 * S * batch, RATE)
        made.ask(300 * S * batch + 1, RATE)  # executed again

    assert not made.is_stale(1490 * S)
    assert made.is_stale(2200 * S)


def test_pause_of_a_query_is_forgotten() -> None:
    """A table that was restored often since a long pause is stale after an interval, like any other."""
    made = schedule()
    for batch in range(20):
        made.ask(100_000 * S + batch * S, RATE)

    assert made.is_stale(100_130 * S)


def test_switched_off_asks_nobody() -> None:
    """If the setting is off, nothing is ever due."""
    made = schedule(0.0, enabled=False)
    made.logged(1, 10**12)

    assert made.ask(10**9, RATE) is None


@pytest.mark.parametrize("name", [f.name for f in fields(MaterializationSettings) if f.type in ("int", "float")])
def test_negative_setting_is_refused(name: str) -> None:
    """No setting may be negative; the message names it."""
    options: dict[str, Any] = {name: -1}  # one of many types, by its name
    with pytest.raises(InvalidInputError, match=name):
        MaterializationSettings(**options)
