"""Processors with event-time and processing-time timers, and states with a TTL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.e2e.differential.reporting import Reporting

_SHORT_MS, _LONG_MS = 1, 3_600_000


def moment_of(row: Any) -> int:
    """Return a row's time in milliseconds."""
    return int(row.t.timestamp() * 1000)


class Scripted(Reporting):
    """Timers that are set and deleted before, at and after the watermark, in rows and in other timers."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.plan = handle.getValueState("plan", "set long, remove long")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            moment, listed = moment_of(row), self.handle.listTimers()  # read only after the changes
            if row.op < 3:
                self.handle.registerTimer(moment + (-30_000, 0, 5_000, 10_000, 20_000)[row.n])
            elif row.op == 3:
                self.handle.deleteTimer(moment + 5_000)
            elif row.op == 4:
                for timer in sorted(self.handle.listTimers())[row.n :]:
                    self.handle.deleteTimer(timer)
            else:
                self.plan.update((moment + (-30_000, 10_000)[row.n % 2], moment + 5_000))
                self.handle.registerTimer(moment + 3_000)
            yield row.t, values.getCurrentWatermarkInMs(), sorted(listed)

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        yield "expired", moment_ms, values.getCurrentWatermarkInMs(), sorted(self.handle.listTimers())
        if self.plan.exists():
            set_ms, removed_ms = self.plan.get()
            self.plan.clear()
            self.handle.registerTimer(set_ms)
            self.handle.deleteTimer(removed_ms)
            yield "planned", sorted(self.handle.listTimers())


class Sessions(Reporting):
    """A session ends eight seconds after its newest row: one timer, which moves with it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.session = handle.getValueState("session", "start long, end long, n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            moment = moment_of(row)
            start, end, n = self.session.get() or (moment, moment + 8_000, 0)
            self.handle.deleteTimer(end)
            self.session.update((min(start, moment), max(end, moment + 8_000), n + 1))
            self.handle.registerTimer(max(end, moment + 8_000))
        yield from ()

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        yield moment_ms, self.session.get()
        self.session.clear()


class Absence(Reporting):
    """A heartbeat: reports three times that a key has been silent for long, with a timer that sets the next one."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.silence = handle.getValueState("silence", "since long, alarms int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        newest = max(moment_of(row) for row in rows)
        for timer in list(self.handle.listTimers()):
            self.handle.deleteTimer(timer)
        self.silence.update((newest, 0))
        self.handle.registerTimer(newest + 12_000)
        yield "alive", newest

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        since, alarms = self.silence.get()
        yield "silent", since, moment_ms, alarms
        if alarms < 2:
            self.silence.update((since, alarms + 1))
            self.handle.registerTimer(values.getCurrentWatermarkInMs() + 6_000)
        else:
            self.silence.clear()


class Buffered(Reporting):
    """Keeps rows until their time has come, and emits them in time order: a sort by time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.waiting = handle.getListState("waiting", "t long, name string, n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            self.waiting.appendValue((moment_of(row), row.name, row.n))
            self.handle.registerTimer(moment_of(row))
        yield len(list(self.handle.listTimers()))

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        left = []
        for item in self.waiting.get():
            if item[0] <= moment_ms:
                yield "in order", *item
            else:
                left.append(tuple(item))
        self.waiting.put(left) if left else self.waiting.clear()


class Forgetting(Reporting):
    """A map with one timer per entry that removes it."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.ends = handle.getMapState("ends", "name string", "end long, n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            end = moment_of(row) + 4_000 * row.n
            self.ends.updateValue((row.name,), (end, row.n))
            self.handle.registerTimer(end)
        yield sorted(self.ends.iterator(), key=repr)

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        for name, (end, _) in list(self.ends.iterator()):
            if end <= moment_ms:
                self.ends.removeKey(name)
        yield "left", moment_ms, sorted(self.ends.iterator(), key=repr), self.ends.exists()


class OnTime(Reporting):
    """Counts the rows that are not late, and reports its watermark; sets no timer."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        self.count.update(((self.count.get() or (0,))[0] + len(rows),))
        yield self.count.get(), [row.t for row in rows], values.getCurrentWatermarkInMs()


class _Aging(Reporting):
    """Two states of one kind, one that expires at once and one that lasts; reports both before and after writing."""

    short: Any
    long: Any

    def look(self, state: Any) -> Any:
        """Return the visible content of a state."""
        raise NotImplementedError

    def write(self, state: Any, row: Row) -> None:
        """Change a state as a row says."""
        raise NotImplementedError

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        assert values.getCurrentProcessingTimeInMs() > 1_700_000_000_000
        for states in (self.short, self.long):
            yield self.look(states)
            for row in rows:
                self.write(states, row)
            yield self.look(states)


class AgingValues(_Aging):
    """Values with a TTL."""

    def init(self, handle: Any) -> None:
        self.short = handle.getValueState("short", "n int, name string", _SHORT_MS)
        self.long = handle.getValueState("long", "n int, name string", _LONG_MS)

    def look(self, state: Any) -> Any:
        return state.exists(), state.get()

    def write(self, state: Any, row: Row) -> None:
        state.clear() if row.op == 4 else state.update((row.n, row.name))


class AgingLists(_Aging):
    """List elements, each with its own TTL."""

    def init(self, handle: Any) -> None:
        self.short = handle.getListState("short", "n int", _SHORT_MS)
        self.long = handle.getListState("long", "n int", _LONG_MS)

    def look(self, state: Any) -> Any:
        return state.exists(), list(state.get())

    def write(self, state: Any, row: Row) -> None:
        if row.op < 3:
            state.appendValue((row.n,))
        elif row.op == 3:
            state.appendList([(row.n,), (row.op,)])
        elif row.op == 4:
            state.clear()
        else:
            state.put([(row.n,), (row.n,)])


class AgingMaps(_Aging):
    """Map entries, each with its own TTL."""

    def init(self, handle: Any) -> None:
        self.short = handle.getMapState("short", "n int", "name string", _SHORT_MS)
        self.long = handle.getMapState("long", "n int", "name string", _LONG_MS)

    def look(self, state: Any) -> Any:
        content = sorted(state.iterator(), key=repr)
        keys = sorted(state.keys())
        return state.exists(), content, keys, len(list(state.values())), state.containsKey((0,)), state.getValue((1,))

    def write(self, state: Any, row: Row) -> None:
        if row.op == 4:
            state.removeKey((row.n,))
        elif row.op == 5:
            state.clear()
        else:
            state.updateValue((row.n,), (row.name,))


class Alarms(Reporting):
    """Processing-time timers: due at once, in the next batch, and much later."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.fired = handle.getValueState("fired", "n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        now_ms = values.getCurrentProcessingTimeInMs()
        for row in rows:
            self.handle.registerTimer(now_ms + (-5, 0, 1, _LONG_MS, 2 * _LONG_MS)[row.n])
            if row.op == 4:
                self.handle.deleteTimer(now_ms)
        yield sorted(timer - now_ms for timer in self.handle.listTimers() if timer - now_ms < _LONG_MS // 2)
        yield self.fired.get()

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        assert moment_ms <= values.getCurrentProcessingTimeInMs()
        self.fired.update(((self.fired.get() or (0,))[0] + 1,))
        yield "fired", self.fired.get()


class AgingWithTimers(Reporting):
    """A value that ends by its TTL or by a timer, as a row requests."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int", _LONG_MS)
        self.gone = handle.getMapState("gone", "n int", "times int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            self.value.update((row.n,))
            if row.op < 3:
                self.handle.registerTimer(values.getCurrentProcessingTimeInMs() + 1)
        yield self.value.get(), sorted(self.gone.iterator())

    def on_timer(self, key: Any, moment_ms: int, values: Any) -> Iterator[Any]:
        if self.value.exists():
            times = (self.gone.getValue(self.value.get()) or (0,))[0]
            self.gone.updateValue(self.value.get(), (times + 1,))
            self.value.clear()
        yield "ended", sorted(self.gone.iterator())


EVENT_TIME: dict[str, type[StatefulProcessor]] = {
    "timers": Scripted,
    "sessions": Sessions,
    "absence": Absence,
    "sort-by-time": Buffered,
    "timers-of-entries": Forgetting,
    "late-rows": OnTime,
}
PROCESSING_TIME: dict[str, type[StatefulProcessor]] = {
    "ttl-values": AgingValues,
    "ttl-lists": AgingLists,
    "ttl-maps": AgingMaps,
    "processing-time-timers": Alarms,
    "ttl-and-timers": AgingWithTimers,
}
