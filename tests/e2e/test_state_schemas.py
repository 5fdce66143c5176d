"""
States whose schemas change between two runs of a query, beyond what Spark supports; `differential` tests the rest.

A failure means that a changed program reads other values than it wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StringType, StructType

from backend_client import ChangelogStateBackend
from backend_client.state.ddl import parse_schema
from storage.errors import InvalidInputError
from tests.e2e.support import Collected, read_input, run_to_end, write_input

pytestmark = pytest.mark.spark

OUTPUT = "k string, seen string"
KEYS = ["a", "b", "c"]


class Versions(StatefulProcessor):
    """Reports the content of its states, and writes what the program's version can write."""

    def __init__(self, version: int) -> None:
        self.version = version

    def init(self, handle: Any) -> None:
        with_default = StructType().add("kind", StringType(), False, {"default": "old"}).add("n", LongType())
        schemas: list[tuple[Any, str, str]] = [
            ("n int, gone string", "pair struct<x: int>", "total int"),
            (with_default, "pair struct<y: string, x: long>, tags array<string>", "total double"),
            ("n long", "pair struct<y: string, x: long>", "total double, unit string"),
        ]
        value, element, item = schemas[self.version]
        self.value = handle.getValueState("value", value)
        self.list = handle.getListState("list", element)
        self.map = handle.getMapState("map", "name string", item)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        (row,) = rows
        seen = [self.value.get(), [*self.list.get()], sorted(self.map.iterator())]
        n = int(row.v)
        value, element, item = [
            ((n, "x"), ((n,),), (n,)),
            (("new", n), (("y", n), ["t"]), (n + 0.5,)),
            ((n,), (("z", n),), (n + 0.25, "kg")),
        ][self.version]
        if key[0] != "b" or self.version == 0:  # values of this key stay as the first version wrote them
            self.value.update(value)
        self.list.appendValue(element)
        self.map.updateValue((f"v{self.version}",), item)
        yield Row(k=key[0], seen=repr([tuple(part) if isinstance(part, tuple) else part for part in seen]))

    def close(self) -> None:
        pass


def run(spark: SparkSession, backend: ChangelogStateBackend, folder: Path, processor: StatefulProcessor) -> Collected:
    """Run a processor, under its operator's name, over the new input."""
    collected = Collected()
    stream = read_input(spark, folder / "in").groupBy("k")
    result = backend.transform_with_state(stream, processor, OUTPUT, "Update", "None", name="versions")
    run_to_end(result.writeStream, folder / "chk", collected)
    return collected


def test_state_of_older_schemas_is_read_after_restarts(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I14, I15: values of every schema in a job's history are read with the newest one, also from the log alone."""
    found = []
    for version in range(3):
        write_input(tmp_path / "in", [[(key, float(number)) for key in KEYS] for number in range(version + 1)])
        backend = make_backend(parallelism=1 + version % 2)
        shutil.rmtree(Path(backend.settings.local_dir) / "tables", ignore_errors=True)
        found.append(dict(run(spark, backend, tmp_path, Versions(version)).batches[version]))

    assert found[0]["a"] == "[None, [], []]"
    assert found[1]["a"] == "[('old', 0), [(Row(y=None, x=0), None)], [(('v0',), (0.0,))]]"
    lists = "[(Row(y=None, x=0),), (Row(y='y', x=1),)]"
    maps = "[(('v0',), (0.0, None)), (('v1',), (1.5, None))]"
    assert found[2]["a"] == f"[(1,), {lists}, {maps}]"
    assert found[2]["b"] == f"[(0,), {lists}, {maps}]"


def test_impossible_change_is_refused_and_state_is_kept(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """A lossy change is refused with the field's name; the previous program continues with its state."""
    write_input(tmp_path / "in", [[("a", 0.0)]])
    run(spark, make_backend(), tmp_path, Versions(1))
    write_input(tmp_path / "in", [[("a", 0.0)], [("a", 1.0)]])

    with pytest.raises(InvalidInputError, match="state 'value' of operator 'versions': field 'n' was stored as bigint"):
        run(spark, make_backend(), tmp_path, Versions(0))
    assert "('new', 0)" in run(spark, make_backend(), tmp_path, Versions(1)).batches[1][0][1]


@pytest.mark.parametrize(
    "text",
    [
        "n long, s STRING not null comment 'it\\'s'",
        "n: bigint, m int, `a b` tinyint, `c``d` smallint, t timestamp_ltz, w timestamp_ntz, d date",
        "a decimal, b dec(5), c numeric(12, 3), f real, g double, h boolean, i binary, j byte, k short, v void",
        "l array<struct<x: int, y array<date>>>, m map<string, struct<x: int not null>>",
        "v varchar(3), c char(2), i interval day to second, j interval hour to minute, k interval second",
        "a time, b TIME(3)",
        "struct<a:int>",
        "struct int",
    ],
)
def test_text_schemas_are_those_of_spark(spark: SparkSession, text: str) -> None:
    """`StateTester`, which runs without Spark, parses schemas as Spark does."""
    assert parse_schema(text) == spark._parse_ddl(text).jsonValue()
