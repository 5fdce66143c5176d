"""A pause is divided by Spark's event log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.bench_recovery.event_log import EventLog, covered_ms, parts_ms


def _task(began: int, ended: int, kind: str, reason: str = "Success") -> dict[str, Any]:
    info = {"Host": "a", "Executor ID": "1", "Launch Time": began, "Finish Time": ended}
    return {
        "Event": "SparkListenerTaskEnd",
        "Stage ID": 1,
        "Task Type": kind,
        "Task Info": info,
        "Task End Reason": {"Reason": reason},
    }


def test_pause_is_divided_completely() -> None:
    """Each moment belongs to one part; what is over before the loss, or later than the output, counts nowhere."""
    events = [
        _task(0, 900, "ResultTask"),
        {"Event": "SparkListenerExecutorRemoved", "Timestamp": 1_300, "Executor ID": "2"},
        _task(1_400, 1_900, "ShuffleMapTask"),
        _task(1_800, 2_400, "ResultTask"),
        {"Event": "SparkListenerJobStart", "Job ID": 3, "Submission Time": 1_000},
        {"Event": "SparkListenerJobEnd", "Job ID": 3, "Completion Time": 2_500},
        _task(5_000, 6_000, "ResultTask"),
    ]
    lines = [json.dumps(event) + "\n" for event in events]

    log = EventLog()
    log.take([*lines, '{"Event": "cut o'])

    parts = parts_ms(log, 1_000, 3_000)

    assert parts == {
        "detection": 300,
        "resubmission": 100,
        "rows to partitions": 500,
        "operator and output": 500,
        "in jobs": 100,
        "between jobs": 500,
    }
    assert sum(parts.values()) == pytest.approx(2_000)


def test_overlapping_spans_count_once() -> None:
    """Time that several spans cover counts once, and only within the limits."""
    assert covered_ms([(0, 10), (5, 20), (30, 99)], 2, 40) == 28
