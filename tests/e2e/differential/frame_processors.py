"""Processors of the pandas API, with every kind of state and with timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql.streaming import StatefulProcessor

from tests.e2e.differential.reporting import ReportingFrames


class FrameTotals(ReportingFrames):
    """A value of sums, as NumPy scalars from a frame."""

    def init(self, handle: Any) -> None:
        self.totals = handle.getValueState("totals", "n long, mean double, last timestamp")

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        before = self.totals.get()
        self.totals.update(((before[0] if before else 0) + frame["n"].sum(), frame["n"].mean(), frame["t"].max()))
        yield before, self.totals.get(), [*frame["name"]]


class FrameLists(ReportingFrames):
    """A list of values from frames, cleared and replaced."""

    def init(self, handle: Any) -> None:
        self.items = handle.getListState("items", "n int, tags array<string>")

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        elements = [(int(n), [str(name)]) for n, name in zip(frame["n"], frame["name"], strict=True)]
        if (frame["op"] == 4).any():
            self.items.clear()
        elif (frame["op"] == 5).any():
            self.items.put(elements)
        else:
            self.items.appendList(elements)
        yield self.items.exists(), list(self.items.get())


class FrameMaps(ReportingFrames):
    """A map of the greatest number and the count of each name."""

    def init(self, handle: Any) -> None:
        self.best = handle.getMapState("best", "name string", "n int, count long")

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        for name, part in frame.groupby("name"):
            n, count = self.best.getValue((name,)) or (-1, 0)
            self.best.updateValue((name,), (max(n, part["n"].max()), count + part["n"].count()))
        if (frame["op"] == 6).all():
            self.best.removeKey(("a",))
        yield sorted(self.best.iterator())


class FrameSessions(ReportingFrames):
    """Sessions in the pandas API: a timer that moves with the newest row."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.newest = handle.getValueState("newest", "t long, n int")

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        before, n = self.newest.get() or (0, 0)
        newest = max(before, int(frame["ms"].max()))
        self.handle.deleteTimer(before + 5_000)
        self.handle.registerTimer(newest + 5_000)
        self.newest.update((newest, n + len(frame)))
        yield newest, list(self.handle.listTimers()), values.getCurrentWatermarkInMs()

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        yield "ended", key, moment_ms, self.newest.get()
        self.newest.clear()


class SilentFrames(ReportingFrames):
    """Yields no frame, an empty one, or sometimes two."""

    def init(self, handle: Any) -> None:
        self.calls = handle.getValueState("calls", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        calls = (self.calls.get() or (0,))[0] + 1
        self.calls.update((calls,))
        yield pd.DataFrame()
        for number in range(calls % 3):
            yield pd.DataFrame({"seen": [f"call {calls}", str(number)], "k": [key[1]] * 2, "plan": [key[0]] * 2})


class OneFrame(ReportingFrames):
    """Yields one frame repeatedly and changes it in between."""

    def init(self, handle: Any) -> None:
        self.calls = handle.getValueState("calls", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        calls = (self.calls.get() or (0,))[0] + 1
        self.calls.update((calls,))
        frame = pd.DataFrame({"plan": [key[0]], "k": [key[1]], "seen": [""]})
        for number in range(3):
            frame.loc[0, "seen"] = f"call {calls}, frame {number}"
            yield frame


class FrameBegins(ReportingFrames):
    """Initial state as frames: counts rows, starting with a report of the initial state's columns and types."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long, told string")

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        n, told = self.total.get() or (0, "")
        told += repr(sorted(zip(initialState["name"], initialState["c"], strict=True)))
        self.total.update((n + initialState["c"].sum(), f"{told} {dict(initialState.dtypes.astype(str))}"))

    def on_frame(self, key: Any, frame: pd.DataFrame, values: Any) -> Iterator[Any]:
        n, told = self.total.get() or (0, "")
        self.total.update((n + len(frame), told or str(dict(frame.dtypes.astype(str)))))
        yield self.total.get()


PROCESSORS: dict[str, type[StatefulProcessor]] = {
    "pandas-values": FrameTotals,
    "pandas-lists": FrameLists,
    "pandas-maps": FrameMaps,
    "pandas-timers": FrameSessions,
    "pandas-silent": SilentFrames,
    "pandas-one-frame": OneFrame,
    "pandas-initial-state": FrameBegins,
}
