"""A processor with one state of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor


class Purchases(StatefulProcessor):
    """Counts rows, and stores the amounts in a list and the last amount per article in a map."""

    count_schema = "n int"

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", self.count_schema)
        self.amounts = handle.getListState("amounts", "amount double")
        self.last = handle.getMapState("last", "article string", "amount double")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState.n,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.count.get() or (0,))[0]
        for row in rows:
            n += 1
            self.amounts.appendValue((row.amount,))
            self.last.updateValue((row.article,), (row.amount,))
        self.count.update((n,))
        yield Row(key=key[0], n=n, total=sum(amount for (amount,) in self.amounts.get()))

    def close(self) -> None:
        pass
