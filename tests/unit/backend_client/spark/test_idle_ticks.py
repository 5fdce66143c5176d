"""The source of ticks: each new offset makes a batch, so offsets must go on growing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pyspark.sql.types import StructType

from backend_client.spark.start.idle_ticks import IdleTicks

NOW_S = 1_700_000_000.0


class Clocks:
    """The clock of a host, and the one that never goes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.monotonic_s = NOW_S, 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now_s)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic_s)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Return the clocks that the source reads."""
    return Clocks(monkeypatch)


def reader(interval_s: float) -> Any:
    """Return the reader of a query that starts."""
    return IdleTicks({"interval_s": str(interval_s)}).streamReader(StructType())


def test_each_interval_has_a_tick(clocks: Clocks) -> None:
    """A batch runs after each interval, and no more often: none just for a restart."""
    ticks = reader(10)
    first = ticks.latestOffset(ticks.initialOffset())
    assert reader(10).latestOffset(first) == first
    clocks.advance(9.9)
    assert ticks.latestOffset(first) == first
    clocks.advance(0.2)
    second = ticks.latestOffset(first)
    assert second["dstl_tick"] == first["dstl_tick"] + 1
    clocks.advance(100)
    assert ticks.latestOffset(second)["dstl_tick"] == second["dstl_tick"] + 10


@pytest.mark.parametrize("between", ["clock set back", "longer interval", "both"])
def test_ticks_go_on_after_a_restart(clocks: Clocks, between: str) -> None:
    """The clock may be set back by an hour, while the query runs or before, and the next run may have longer ticks."""
    before = reader(10).latestOffset({"dstl_tick": 0})
    if between in ("clock set back", "both"):
        clocks.now_s -= 3600
    interval_s = 600 if between in ("longer interval", "both") else 10
    ticks = reader(interval_s)
    first = ticks.latestOffset(before)
    assert first["dstl_tick"] > before["dstl_tick"]

    clocks.now_s -= 3600
    clocks.advance(interval_s)
    assert ticks.latestOffset(first)["dstl_tick"] > first["dstl_tick"]
