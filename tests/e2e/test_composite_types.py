"""
Types of every kind in keys, rows, state and output: on Spark's own operator and on this backend.

A failure means that a processor sees or writes other values here than on Spark.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from storage.errors import InvalidInputError
from tests.e2e.support import Collected, run_to_end

pytestmark = pytest.mark.spark

COLUMNS = {
    "flag": "boolean",
    "tiny": "byte",
    "small": "short",
    "number": "int",
    "big": "long",
    "single": "float",
    "twice": "double",
    "amount": "decimal(12,3)",
    "name": "string",
    "raw": "binary",
    "day": "date",
    "moment": "timestamp",
    "wall": "timestamp_ntz",
    "point": "struct<x: int, day: date, name: string>",
    "pair": "struct<x: int, when: timestamp, parts: array<decimal(5,2)>>",
    "list": "array<struct<n: long, raw: binary>>",
    "lookup": "map<string, struct<day: date, tags: array<string>>>",
}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
MOMENT = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)
VALUES: list[tuple[Any, ...]] = [
    (
        True,
        -5,
        300,
        70_000,
        1 << 60,
        0.5,
        -0.1,
        Decimal("12.345"),
        "Ünï",
        bytearray(b"\x00\xff"),
        dt.date(1969, 7, 20),
        MOMENT,
        MOMENT,
        Row(x=1, day=dt.date(2024, 2, 29), name=None),
        Row(x=1, when=MOMENT, parts=[Decimal("1.50"), None]),
        [Row(n=1, raw=bytearray(b"a")), None, Row(n=None, raw=None)],
        {"a": Row(day=dt.date(2024, 1, 1), tags=["x", None]), "b": None},
    ),
    (None,) * len(COLUMNS),
    (
        False,
        127,
        -32768,
        0,
        -1,
        float("inf"),
        1e300,
        Decimal("-0.001"),
        "",
        bytearray(),
        dt.date(1, 1, 1),
        dt.datetime(1900, 1, 1),
        dt.datetime(1, 1, 1),
        Row(x=None, day=None, name=""),
        Row(x=None, when=None, parts=[]),
        [],
        {},
    ),
]
# Spark fails on keys that hold arrays.
KEY_COLUMNS = [name for name in COLUMNS if name not in ("pair", "list", "lookup")]
OUTPUT = f"seen array<string>, {SCHEMA}"


class Echo(StatefulProcessor):
    """Says in full what it is given as key, row and state, and yields the row before."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", SCHEMA)
        self.all = handle.getListState("all", SCHEMA)
        self.by_key = handle.getMapState("by_key", KEYS_OF_MAP, SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            # Rows have maps as pairs, states and output take dictionaries.
            values = (*row[2:-1], None if row.lookup is None else dict(row.lookup))
            before = self.last.get()
            entry = (row.number, row.name, row.day, row.amount)
            seen = [repr(key), repr(row), repr(before), repr([*self.all.get()])]
            seen += [repr(self.by_key.getValue(entry)), repr(sorted(self.by_key.iterator(), key=repr))]
            self.last.update(values)
            self.all.appendValue(values)
            self.by_key.updateValue(entry, values)
            yield Row(seen=seen, **dict(zip(COLUMNS, before or values, strict=True)))

    def close(self) -> None:
        pass


KEYS_OF_MAP = "number int, name string, day date, amount decimal(12,3)"


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Two files, a batch each, with one row per key, of which one is all null."""
    schema = f"k string, j int, {SCHEMA}"
    folder = tmp_path / "in"
    for number in range(2):
        shift = VALUES[number:] + VALUES[:number]
        rows = [("k", at, *values) for at, values in enumerate(shift)]
        spark.createDataFrame(rows, schema).coalesce(1).write.mode("append").parquet(str(folder))
        (written,) = folder.glob("part-0*.parquet")
        path = written.rename(folder / f"part-done-{number}.parquet")
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


@pytest.mark.parametrize("keys", [["k", "j"], KEY_COLUMNS])
def test_values_of_any_type_are_as_on_spark(
    spark: SparkSession, stream: DataFrame, make_backend: Any, tmp_path: Path, keys: list[str]
) -> None:
    """I14: a processor is given the same Python values as on Spark, in keys, rows, state, and gives the same output."""
    theirs, ours = Collected(), Collected()
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    result = stream.groupBy(*keys).transformWithState(Echo(), OUTPUT, "Update", "None")
    run_to_end(result.writeStream.outputMode("update"), tmp_path / "theirs", theirs)
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", str(before))
    backend: ChangelogStateBackend = make_backend()
    frame = backend.transform_with_state(stream.groupBy(*keys), Echo(), OUTPUT, "Update", "None")
    run_to_end(frame.writeStream.outputMode("update"), tmp_path / "ours", ours)

    assert sorted(theirs.batches) == [0, 1]
    assert ours.batches == theirs.batches


def test_keys_may_hold_arrays(stream: DataFrame, make_backend: Any, tmp_path: Path) -> None:
    """Arrays and structs of them are keys like others: each row finds what its equal left behind."""
    ours = Collected()
    frame = make_backend().transform_with_state(stream.groupBy("pair", "list"), Echo(), OUTPUT, "Update", "None")
    run_to_end(frame.writeStream, tmp_path / "ours", ours)

    assert {row[0][2] for row in ours.batches[0]} == {"None"}
    assert [row[1:] for row in ours.batches[1]] == [row[1:] for row in ours.batches[0]]
    assert "None" not in {row[0][2] for row in ours.batches[1]}


def test_variant_is_refused(spark: SparkSession, make_backend: Any, tmp_path: Path) -> None:
    """A state that cannot hold its type is refused before the query starts, with the field's name."""

    class Variants(Echo):
        def init(self, handle: Any) -> None:
            self.last = handle.getValueState("last", "name string, what variant")

    (tmp_path / "in").mkdir()
    rows = spark.readStream.schema("k string").json(str(tmp_path / "in"))
    with pytest.raises(InvalidInputError, match=r"last\.what: state cannot hold the type variant"):
        make_backend().transform_with_state(rows.groupBy("k"), Variants(), "k string", "Update", "None")
