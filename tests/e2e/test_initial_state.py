"""
Initial state after failures, and invalid initial state. Its use is compared with Spark's own in `differential`.

A failure means that initial rows are lost, duplicated, or arrive after the first rows of their key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from storage.errors import InvalidInputError
from tests.e2e.support import Collected, read_input, run_to_end, write_input

pytestmark = pytest.mark.spark

OUTPUT = "k string, log string"
FILES: list[list[tuple[str | None, float]]] = [[("x", 1.0), ("y", 2.0)]]


class Counted(StatefulProcessor):
    """Counts the rows of a key, beginning with ten for each row of its initial state."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._add(10)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(v=row.v, n=self._add(1))

    def _add(self, n: int) -> int:
        total: int = (self.count.get() or (0,))[0] + n
        self.count.update((total,))
        return total

    def close(self) -> None:
        pass


class Journal(StatefulProcessor):
    """Records its calls, in order; fails with its first rows while a file exists."""

    def __init__(self, broken: Path | None = None) -> None:
        self.broken = broken

    def init(self, handle: Any) -> None:
        self.log = handle.getListState("log", "entry string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        times = [timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()]
        self.log.appendValue((f"{key!r} {initialState!r} {times}",))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.log.appendValue((repr(row),))
        if self.broken is not None and self.broken.exists():
            raise RuntimeError("the processor is broken")
        entries = [entry for (entry,) in self.log.get()]
        yield Row(k=key[0], log=json.dumps([*sorted(entries[:2]), *entries[2:]]))  # the order of two is undefined

    def close(self) -> None:
        pass


@pytest.fixture
def initial(spark: SparkSession) -> DataFrame:
    """Rows of keys with input in the first batch, in a later one, and never; two rows of one key, and a null key."""
    rows = [("x", 10, [1]), ("x", 11, None), ("z", 12, [2, 3]), (None, 13, []), ("w", 14, [4]), ("never", 15, [5])]
    return spark.createDataFrame(rows, "name string, c long, parts array<int>").repartition(3)


def test_failed_first_batch_takes_initial_state_once(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], initial: DataFrame, tmp_path: Path
) -> None:
    """I14: a first batch that failed midway is executed again, with the initial state once."""
    write_input(tmp_path / "in", FILES)
    broken, collected = tmp_path / "broken", Collected()
    broken.touch()
    stream = read_input(spark, tmp_path / "in")

    def start() -> None:
        grouped = stream.groupBy("k")
        frame = make_backend().transform_with_state(
            grouped, Journal(broken), OUTPUT, "Update", "None", initial.groupBy("name")
        )
        run_to_end(frame.writeStream, tmp_path / "chk", collected)

    with pytest.raises(StreamingQueryException, match="the processor is broken"):
        start()
    broken.unlink()
    start()

    (of_x, of_y) = (json.loads(log) for _, log in collected.batches[0])
    assert [entry.count("Row(name='x'") for entry in of_x] == [1, 1, 0]
    assert of_y == ["Row(k='y', v=2.0)"]


def test_impossible_initial_state_is_refused(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], initial: DataFrame, tmp_path: Path
) -> None:
    """Initial state with another key type, not grouped, or from a stream, is refused where it is given."""
    write_input(tmp_path / "in", FILES)
    stream = read_input(spark, tmp_path / "in")
    for wrong, message in (
        (initial.groupBy("c"), r"initialState is grouped by types \(bigint\), the input by \(string\)"),
        (initial, "must be a batch DataFrame, grouped by the same key as the input"),
        (stream.groupBy("k"), "must be a batch DataFrame, grouped by the same key as the input"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            make_backend().transform_with_state(stream.groupBy("k"), Journal(), OUTPUT, "Update", "None", wrong)


@pytest.mark.parametrize("key", ["t", "window(t, '10 seconds')"])
def test_event_time_may_be_the_key(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path, key: str
) -> None:
    """I14: a key that is the event time, or a window of it, finds its initial state; late rows are dropped."""
    write_input(tmp_path / "in", [[("x", 1.0), ("y", 100.0)], [("x", 2.0), ("x", 100.0)]])
    moments = spark.createDataFrame([(1.0,), (100.0,)], "v double").selectExpr("timestamp_seconds(v) as t", "v")
    stream = read_input(spark, tmp_path / "in").withColumn("t", F.timestamp_seconds("v")).withWatermark("t", "1 second")
    collected = Collected()

    def keyed(rows: DataFrame) -> Any:
        return rows.select(F.expr(key).alias("key"), *(name for name in rows.columns if name != "t")).groupBy("key")

    frame = make_backend().transform_with_state(
        keyed(stream), Counted(), "v double, n long", "Update", "EventTime", keyed(moments)
    )
    run_to_end(frame.writeStream, tmp_path / "chk", collected)

    assert collected.batches == {0: [(1.0, 11), (100.0, 11)], 1: [(100.0, 12)]}
