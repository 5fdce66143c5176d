"""Processors of the Row API without time: one for each common use of state."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.e2e.differential.reporting import Reporting


class Values(Reporting):
    """A value that is set, set to nulls and cleared; null differs from no value."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "name string, n long")
        self.count = handle.getValueState("count", "n long")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            if row.op < 3:
                self.last.update((row.name, row.n))
            elif row.op == 3:
                self.last.update((None, None))
            elif row.op == 4:
                self.last.clear()
            self.count.update(((self.count.get() or (0,))[0] + 1,))
            yield self.last.exists(), self.last.get(), self.count.get()


class Lists(Reporting):
    """A list that grows by one and by several, is replaced, cleared, and appended to during iteration."""

    def init(self, handle: Any) -> None:
        self.items = handle.getListState("items", "name string, n long")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            if row.op < 2:
                self.items.appendValue((row.name, row.n))
            elif row.op == 2:
                self.items.appendList([(row.name, row.n), (None, row.n + 1)])
            elif row.op == 3:
                self.items.put([(row.name, row.n)])
            elif row.op == 4:
                self.items.clear()
            elif row.op == 5:
                for name, n in self.items.get():
                    self.items.appendValue((name, n + 1))
            yield self.items.exists(), list(self.items.get())


class Maps(Reporting):
    """A map with keys and values of several fields: entries are set, read, removed and changed during iteration."""

    def init(self, handle: Any) -> None:
        self.ages = handle.getMapState("ages", "name string, even boolean", "n long, tags array<string>")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            entry = (row.name, row.n % 2 == 0)
            found = None
            if row.op < 3:
                self.ages.updateValue(entry, (row.n, [row.name, str(row.op)]))
            elif row.op == 3:
                found = self.ages.containsKey(entry), self.ages.getValue(entry)
            elif row.op == 4:
                self.ages.removeKey(entry)
            elif row.op == 5:
                self.ages.clear()
            else:
                for name, value in self.ages.iterator():
                    self.ages.updateValue(name, (value[0] + 1, list(value[1])))
            content = sorted(self.ages.iterator(), key=repr)
            keys = sorted(self.ages.keys(), key=repr)  # a state, not a dict
            yield self.ages.exists(), content, keys, sorted(self.ages.values(), key=repr), found


class Several(Reporting):
    """An order book: a value, a list and a map of one key, with entries that move between them."""

    def init(self, handle: Any) -> None:
        self.number = handle.getValueState("number", "n int")
        self.open = handle.getListState("open", "number int, name string")
        self.done = handle.getMapState("done", "number int", "name string, n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            number = self.number.get()[0] if self.number.exists() else 0
            if row.op < 4:
                self.number.update((number + 1,))
                self.open.appendValue((number, row.name))
            else:
                waiting = list(self.open.get())
                self.open.put(waiting[1:]) if len(waiting) > 1 else self.open.clear()
                for taken in waiting[:1]:
                    self.done.updateValue((taken[0],), (taken[1], row.n))
        yield self.number.get(), list(self.open.get()), sorted(self.done.iterator())


class Rounds(Reporting):
    """State that is cleared at the end of a round and rebuilt, in the same batch and in later ones."""

    def init(self, handle: Any) -> None:
        self.round = handle.getValueState("round", "n int, total long")
        self.names = handle.getMapState("names", "name string", "n int")
        self.seen = handle.getListState("seen", "n int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            n, total = self.round.get() or (0, 0)
            self.round.update((n + 1, total + row.n))
            self.names.updateValue((row.name,), (row.n,))
            self.seen.appendValue((row.n,))
            if total + row.n >= 5:
                yield self.round.get(), sorted(self.names.iterator(), key=repr), list(self.seen.get())
                self.round.clear()
                self.names.clear()
                self.seen.clear()
                yield self.round.exists(), self.names.exists(), self.seen.exists()


class Deduplication(Reporting):
    """Passes the first row of each name and number."""

    def init(self, handle: Any) -> None:
        self.known = handle.getMapState("known", "name string, n int", "first int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            if not self.known.containsKey((row.name, row.n)):
                self.known.updateValue((row.name, row.n), (row.op,))
                yield row.name, row.n, row.op


class TopK(Reporting):
    """Keeps the three greatest values of a key in a list that is replaced, and reports changes."""

    def init(self, handle: Any) -> None:
        self.best = handle.getListState("best", "score int, name string")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        before = [tuple(item) for item in self.best.get()]
        scores = [(10 * row.n + row.op, row.name or "-") for row in rows]
        best = sorted(before + scores, key=itemgetter(0, 1), reverse=True)[:3]
        if best != before:
            self.best.put(best)
            yield best


class Statistics(Reporting):
    """Running mean, variance, minimum and maximum in floating point, including NaN."""

    def init(self, handle: Any) -> None:
        self.moments = handle.getValueState("moments", "n long, mean double, m2 double, low float, high float")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            value = (0.1, -0.0, 1e300, float("inf"), float("nan"))[row.n] if row.op == 0 else row.n / 3
            n, mean, m2, low, high = self.moments.get() or (0, 0.0, 0.0, float("inf"), float("-inf"))
            n, step = n + 1, value - mean
            mean += step / n
            self.moments.update((n, mean, m2 + step * (value - mean), min(low, value), max(high, value)))
        yield self.moments.get()


class Fraud(Reporting):
    """A state machine: two small amounts followed by a large one are an alarm, after which the key is blocked."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("state", "name string, small array<int>")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            name, small = self.state.get() or ("open", [])
            if name == "blocked":
                if row.op == 6:
                    self.state.clear()
                    yield "released"
                continue
            if row.n < 2:
                self.state.update((name, [*small, row.n][-2:]))
            elif row.n == 4 and len(small) == 2:
                self.state.update(("blocked", None))
                yield "alarm", list(small), row.name
            else:
                self.state.update((name, []))


class Silent(Reporting):
    """Yields nothing, returns an iterable that can be read only once, and reports its findings on request."""

    def init(self, handle: Any) -> None:
        self.calls = handle.getValueState("calls", "n int, rows int")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        calls, total = self.calls.get() or (0, 0)
        self.calls.update((calls + 1, total + len(rows)))
        return iter([(calls, total)] if any(row.op == 6 for row in rows) else ())


class Lazy(Reporting):
    """Writes between yields, and reads its rows one by one, or only the first one if its state says so."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n int")
        self.list = handle.getListState("list", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        started = (self.count.get() or (0,))[0]
        for at, _ in enumerate(rows):
            self.count.update((started + at + 1,))
            yield Row(plan=key[0], k=key[1], seen=f"{started}, {self.count.get()[0]}, {list(self.list.get())}")
            self.list.appendValue((started + at,))
            if started % 2:
                return


class Nested(Reporting):
    """Values, elements and entries that nest structs, arrays and maps, with nulls at every level."""

    TYPE = "pair struct<x: int, more: struct<name: string, tags: array<string>>>, parts map<string, array<int>>"

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", self.TYPE)
        self.list = handle.getListState("list", f"at int, {self.TYPE}")
        self.map = handle.getMapState("map", "of struct<name: string, n: int>", self.TYPE)

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            more = None if row.op == 0 else (row.name, None if row.op == 1 else [row.name, "x"])
            pair = None if row.op == 2 else (row.n, more)
            parts: Any = None if row.op == 3 else {"p": [row.n, None], "q": None, "": []}
            self.value.update((pair, parts))
            self.list.appendValue((row.op, pair, parts))
            self.map.updateValue(((row.name, row.n % 2),), (pair, parts))
        entries = sorted(self.map.iterator(), key=repr)
        yield _ordered([self.value.get(), list(self.list.get()), entries, self.map.getValue((("a", 0),))])


def _ordered(value: Any) -> Any:
    """Return a value with its dictionaries, whose order is undefined, as sorted lists."""
    if isinstance(value, dict):
        return sorted((name, _ordered(content)) for name, content in value.items())
    if isinstance(value, list | tuple):
        return [_ordered(part) for part in value]
    return value


class Journal(Reporting):
    """Initial state: records its calls in order, with the rows of a key's initial state and its input."""

    def init(self, handle: Any) -> None:
        self.log = handle.getListState("log", "entry string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        times = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
        self.log.appendValue((f"{key!r} {initialState!r} {times}",))

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        self.log.appendList([(repr(row),) for row in rows])
        entries = [entry for (entry,) in self.log.get()]
        # The order of a key's initial rows, of which there are two at most, is undefined.
        yield [*sorted(entries[:2]), *entries[2:]]


PROCESSORS: dict[str, type[StatefulProcessor]] = {
    "values": Values,
    "lists": Lists,
    "maps": Maps,
    "several-states": Several,
    "cleared-and-refilled": Rounds,
    "deduplication": Deduplication,
    "top-k": TopK,
    "running-statistics": Statistics,
    "state-machine": Fraud,
    "silent": Silent,
    "lazy-output": Lazy,
    "nested-state": Nested,
    "initial-state": Journal,
}
