"""
The kinds of state, on Spark's own operator and on this backend: the same processors, rows and restarts.

Here tables are materialized all the time, and lost between the runs, so that they come from snapshots and log.
A failure means that a program behaves differently here than on Spark.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from tests.e2e.support import Collected, materializations, read_input, run_to_end
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

INPUT = "k string, op string, name string, n long"
OUTPUT = "k string, result string"
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Values(StatefulProcessor):
    """Does with a value what each row says, and reports what it is then; null is a value of its own."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "name string, n long")
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.op in ("append", "extend"):
                self.last.update((row.name, row.n))
            elif row.op == "put":
                self.last.update((None, row.n))
            elif row.op in ("remove", "clear"):
                self.last.clear()
        count = (self.count.get() or (0,))[0] + 1
        self.count.update((count,))
        seen = [self.last.exists(), str(self.last.get()), count]
        yield Row(k=key[0], result=json.dumps(seen))

    def close(self) -> None:
        pass


class Lists(StatefulProcessor):
    """Does with a list what each row says, and reports what is in it then."""

    def init(self, handle: Any) -> None:
        self.items = handle.getListState("items", "name string, n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if row.op == "append":
                self.items.appendValue((row.name, row.n))
            elif row.op == "extend":
                self.items.appendList([(row.name, row.n), (None, row.n + 1)])
            elif row.op == "put":
                self.items.put([(row.name, row.n)])
            elif row.op == "clear":
                self.items.clear()
            elif row.op == "remove":
                for item in self.items.get():
                    self.items.appendValue((item[0], item[1] + 1))
        seen = [list(item) for item in self.items.get()] if self.items.exists() else None
        yield Row(k=key[0], result=json.dumps(seen))

    def close(self) -> None:
        pass


class Maps(StatefulProcessor):
    """Does with a map what each row says, and reports what is in it then; a value holds the number of visits."""

    def init(self, handle: Any) -> None:
        self.ages = handle.getMapState("ages", "name string, even boolean", "n long, tags array<string>")
        self.visits = handle.getValueState("visits", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found = []
        for row in rows:
            entry = (row.name, row.n % 2 == 0)
            if row.op in ("append", "extend"):
                self.ages.updateValue(entry, (row.n, [row.name, row.op]))
            elif row.op == "put":
                found.append([row.name, self.ages.containsKey(entry), str(self.ages.getValue(entry))])
            elif row.op == "remove":
                self.ages.removeKey(entry)
            elif row.op == "clear":
                self.ages.clear()
            elif row.op == "change":
                for name, value in self.ages.iterator():
                    self.ages.updateValue(name, (value[0] + 1, list(value[1])))
        visits = (self.visits.get() or (0,))[0] + 1
        self.visits.update((visits,))
        content = sorted([list(name), [value[0], list(value[1])]] for name, value in self.ages.iterator())
        keys = sorted(list(name) for name in self.ages.keys())  # noqa: SIM118 - a state, not a dict
        values = sorted(value[0] for value in self.ages.values())
        seen = [self.ages.exists(), content, keys, values, found, visits]
        yield Row(k=key[0], result=json.dumps(seen))

    def close(self) -> None:
        pass


class WhenStored(Collected):
    """Collects rows, and lets no batch end before the snapshots that it made are stored: the next one names them."""

    def __init__(self, local_dir: Path) -> None:
        super().__init__()
        self.local_dir = local_dir

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        super().__call__(batch, batch_id)
        wait_until(lambda: not list(self.local_dir.rglob("*.snapshot-*")), what="the end of the snapshots")


def write_rows(folder: Path, numbers: range, seed: int) -> None:
    """Write one JSON file of random rows for each number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        chance = random.Random(1000 * seed + number)
        path = folder / f"{number:05d}.json"
        rows = [
            {
                "k": f"key-{chance.randrange(6)}",
                "op": chance.choice(["append", "append", "extend", "put", "remove", "clear", "change"]),
                "name": chance.choice("abc"),
                "n": chance.randrange(4),
            }
            for _ in range(12)
        ]
        # The order of a key's rows within a batch is nobody's promise: one row per key and batch.
        rows = list({row["k"]: row for row in rows}.values())
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


@pytest.fixture
def on_spark(spark: SparkSession) -> Iterator[Callable[[DataFrame, StatefulProcessor], Any]]:
    """Give Spark's own operator, on its RocksDB store."""
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDER)
    yield lambda frame, processor: frame.groupBy("k").transformWithState(processor, OUTPUT, "Update", "None")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", str(before))


@pytest.mark.parametrize("processor", [Values, Lists, Maps])
def test_states_behave_as_on_spark(
    spark: SparkSession,
    on_spark: Callable[[DataFrame, StatefulProcessor], Any],
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    local_dir: Path,
    always_materialized: None,
    processor: type[StatefulProcessor],
) -> None:
    """I14: the same rows give the same output, batch by batch, also from snapshots and with another parallelism."""
    folder, theirs, ours = tmp_path / "input", Collected(), WhenStored(local_dir)
    for part, numbers in enumerate((range(4), range(4, 7))):
        write_rows(folder, numbers, seed=3)
        frame = read_input(spark, folder, INPUT)
        run_to_end(on_spark(frame, processor()).writeStream.outputMode("update"), tmp_path / "theirs", theirs)
        backend = make_backend(parallelism=2 + part)
        result = backend.transform_with_state(frame.groupBy("k"), processor(), OUTPUT, "Update", "None")
        run_to_end(result.writeStream.outputMode("update"), tmp_path / "ours", ours)
        assert materializations(backend.settings.storage)
        shutil.rmtree(local_dir / "tables")

    assert sorted(ours.batches) == list(range(7))
    assert ours.batches == theirs.batches
