"""
Lets the processors of many plans share one query: each reports what it sees as text, and keys name the plan.

A batch of Spark's own operator costs most of a second, however few its rows. So `Together` is one processor that holds
those of many plans; the rows of the stream are repeated for each plan, whose name is the first column of the key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

OUTPUT = "plan string, k string, seen string"


class Reporting(StatefulProcessor):
    """
    A processor that reports what it sees, key by key.

    It gets the rows of a key in the order in which they were generated, which Spark does not guarantee.
    """

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        """Yield a report of the rows."""
        raise NotImplementedError

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        """Yield a report of the timer."""
        raise NotImplementedError

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for seen in self.on_rows(key, sorted(rows, key=attrgetter("i")), timerValues):
            yield Row(plan=key[0], k=key[1], seen=repr(seen))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        for seen in self.on_timer(key, expiredTimerInfo.getExpiryTimeInMs(), timerValues):
            yield Row(plan=key[0], k=key[1], seen=repr(seen))

    def close(self) -> None:
        pass


class ReportingFrames(Reporting):
    """The same in the pandas API: rows arrive as one frame."""

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        """Yield a report of the frame."""
        raise NotImplementedError

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        frame = pd.concat(list(rows)).sort_values("i", ignore_index=True)
        yield from self._frames(key, self.on_frame(key, frame, timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        yield from self._frames(key, self.on_timer(key, expiredTimerInfo.getExpiryTimeInMs(), timerValues))

    def _frames(self, key: Any, reports: Iterator[Any]) -> Iterator[pd.DataFrame]:
        for seen in reports:
            yield pd.DataFrame({"plan": [key[0]], "k": [key[1]], "seen": [repr(seen)]})


class Together(StatefulProcessor):
    """Runs the processors of several plans in one operator, each with its own states."""

    def __init__(self, processors: Mapping[str, StatefulProcessor]) -> None:
        self.processors = dict(processors)

    def init(self, handle: Any) -> None:
        for name, processor in self.processors.items():
            processor.init(_OwnHandle(handle, name))  # type: ignore[arg-type]  # replaces a handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return self.processors[key[0]].handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return self.processors[key[0]].handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.processors[key[0]].handleInitialState(key, initialState, timerValues)

    def close(self) -> None:
        for processor in self.processors.values():
            processor.close()


class _OwnHandle:
    """The operator's handle, with the plan's name as a prefix of state names."""

    def __init__(self, handle: Any, plan: str) -> None:
        self._handle = handle
        self._plan = plan.replace("-", "_")

    def getValueState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getValueState(f"{self._plan}_{stateName}", *arguments, **more)

    def getListState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getListState(f"{self._plan}_{stateName}", *arguments, **more)

    def getMapState(self, stateName: str, *arguments: Any, **more: Any) -> Any:
        return self._handle.getMapState(f"{self._plan}_{stateName}", *arguments, **more)

    def deleteIfExists(self, stateName: str) -> None:
        self._handle.deleteIfExists(f"{self._plan}_{stateName}")

    def registerTimer(self, moment_ms: int) -> None:
        self._handle.registerTimer(moment_ms)

    def deleteTimer(self, moment_ms: int) -> None:
        self._handle.deleteTimer(moment_ms)

    def listTimers(self) -> Iterator[int]:
        timers: Iterator[int] = self._handle.listTimers()
        return timers
