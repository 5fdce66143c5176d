"""The workloads' processors for Spark's interface, the same class on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

OUTPUT = "k int, n long"
TOTALS = "k int, n long, s double"
ENTRIES = 10
READS = 3


class _Processor(StatefulProcessor):
    def close(self) -> None:
        """Nothing to close."""


class Totals(_Processor):
    """Count and sum per key: one get and one update per key and batch."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self.totals = handle.getValueState("totals", "n long, s double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Add the rows."""
        n, s = 0, 0.0
        for row in rows:
            n, s = n + 1, s + row.v
        old = self.totals.get()
        if old is not None:
            n, s = n + old[0], s + old[1]
        self.totals.update((n, s))
        yield Row(k=key[0], n=n, s=s)


class PandasTotals(_Processor):
    """The same in the pandas API, with a frame of one row for each key."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self._totals = handle.getValueState("totals", "n long, s double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:  # noqa: N802, N803
        """Add the rows."""
        n, s = 0, 0.0
        for part in rows:
            n, s = n + len(part), s + float(part["v"].sum())
        old = self._totals.get()
        if old is not None:
            n, s = n + int(old[0]), s + float(old[1])
        self._totals.update((n, s))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "s": [s]})


class Appends(_Processor):
    """Appends an element to a list for each row."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self._seen = handle.getListState("seen", "v double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Append the rows."""
        n = 0
        for row in rows:
            self._seen.appendValue((row.v,))
            n += 1
        yield Row(k=key[0], n=n)


class MapUpdates(_Processor):
    """Keeps ten entries per key; each row updates one and reads three."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self._entries = handle.getMapState("entries", "name int", "v double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Update and read."""
        n = 0
        for row in rows:
            name = int(row.v // 7) % ENTRIES
            self._entries.updateValue((name,), (row.v,))
            for other in range(READS):
                n += self._entries.getValue(((name + other) % ENTRIES,)) is not None
        yield Row(k=key[0], n=n)


class Timers(_Processor):
    """Registers a timer per key and batch, which expires with the next batches."""

    def init(self, handle: Any) -> None:
        """Keep the handle, and declare a state, without which Spark keeps no key."""
        self._handle = handle
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Register a timer after the newest row."""
        newest = max(row.timestamp for row in rows)
        self._handle.registerTimer(int(newest.timestamp() * 1000) + 500)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Count."""
        n = (self._count.get() or (0,))[0] + 1
        self._count.update((n,))
        yield Row(k=key[0], n=n)


class Sizes(_Processor):
    """Second operator of a chain: counts the rows of the first by another key."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Count."""
        n = (self._count.get() or (0,))[0] + sum(1 for _ in rows)
        self._count.update((n,))
        yield Row(k=key[0], n=n)
