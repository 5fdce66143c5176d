"""Processors that change between two runs: other states, and other fields in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row

from tests.e2e.differential.reporting import Reporting

RUNS = 4


class Deleting(Reporting):
    """States that later versions of the program delete, declare again, and delete and declare at once."""

    _STATES = (("a", "b"), ("a", "-b"), ("a", "b"), ("a", "-b", "b"))

    def __init__(self, run: int) -> None:
        self.states = self._STATES[run]

    def init(self, handle: Any) -> None:
        self.values = {}
        for name in self.states:
            if name.startswith("-"):
                handle.deleteIfExists(name[1:])
            else:
                self.values[name] = handle.getValueState(name, "n long")

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        counts = {name: (value.get() or (0,))[0] for name, value in self.values.items()}
        for name, value in self.values.items():
            value.update((counts[name] + 1,))
        yield counts


class Versions(Reporting):
    """State schemas whose fields are added, reordered and removed by later versions of the program."""

    _SCHEMAS = (
        "n int, gone string",
        "more string, n int",
        "n int, more string, tags array<string>",
        "tags array<string>, n int",
    )

    def __init__(self, run: int) -> None:
        self.version = run

    def init(self, handle: Any) -> None:
        schema = self._SCHEMAS[self.version]
        self.value = handle.getValueState("value", schema)
        self.list = handle.getListState("list", schema)
        self.map = handle.getMapState("map", "name string", schema)

    def on_rows(self, key: Any, rows: list[Row], values: Any) -> Iterator[Any]:
        for row in rows:
            tags = [row.name or "-"]  # Spark, which uses Avro for this, cannot store a null in an array
            value = ((row.n, row.name), (row.name, row.n), (row.n, row.name, tags), (tags, row.n))[self.version]
            yield self.value.get(), list(self.list.get()), sorted(self.map.iterator(), key=repr)
            if row.op < 4:
                self.value.update(value)
                self.list.appendValue(value)
                self.map.updateValue((row.name,), value)


PROCESSORS = {"deleted-states": Deleting, "schema-evolution": Versions}
