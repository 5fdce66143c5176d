"""
Operators after Spark's own stateful ones. More of them are compared with Spark's own operator in `differential`.

A failure means that rows as old as the watermark, as Spark emits them, are dropped as late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from backend_client.columnar import Deduplicate
from tests.e2e.busy_stream import run_both, waits
from tests.e2e.differential.history import SCHEMA, Event, Feed, History, Run
from tests.e2e.support import Collected, run_to_end

pytestmark = pytest.mark.spark


class Passing(StatefulProcessor):
    """Yields its rows."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(k=key[0], t=row.t, n=row.n)

    def close(self) -> None:
        pass


def by_rows(backend: ChangelogStateBackend, windows: DataFrame) -> Any:
    """Pass rows through an event-time processor."""
    return backend.transform_with_state(
        windows.groupBy("k"), Passing(), "k string, t timestamp, n long", "Append", "EventTime"
    )


def by_columns(backend: ChangelogStateBackend, windows: DataFrame) -> Any:
    """Pass rows through a columnar operator; none is a duplicate."""
    grouped = windows.groupBy("k", "t")
    return backend.transform_columns(grouped, Deduplicate("t", timedelta(hours=1)), outputMode="Append")


@pytest.mark.parametrize("operator", [by_rows, by_columns], ids=["rows", "columns"])
def test_windows_of_spark_are_not_late(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    operator: Callable[[ChangelogStateBackend, DataFrame], Any],
) -> None:
    """Each window of Spark's own aggregation arrives exactly once."""
    feed, seen = Feed(tmp_path / "input"), Collected()
    rows = tuple((Event("a", 0, "x", 2, second),) for second in (0, 4, 9))
    for content in History((Run(rows, 1),)).files(1)[0]:
        feed.put(content)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(feed.folder)).where("k = 'a'")
    clock = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(feed.folder)).where("k != 'a'")
    grouped = stream.union(clock).withWatermark("t", "1 second").groupBy("k", F.window("t", "5 seconds"))
    windows = grouped.agg(F.sum("n").alias("n")).select("k", F.window_time("window").alias("t"), "n")

    run_to_end(operator(make_backend(), windows).writeStream, tmp_path / "chk", seen)

    arrived = sorted((row[1].second, row[2]) for batch in seen.batches.values() for row in batch if row[0] == "a")
    assert len(arrived) == 3
    assert {n for _, n in arrived} == {2}


def test_rows_come_before_timers_where_the_stream_does_not_pause(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    A timer sees the rows of the batch in which it fires, as with Spark's own operator, batch by batch.

    Between two immediately consecutive batches Spark runs none without data: no timer fires before the second one's
    rows, and its watermark does not make them late.
    """

    def program(stream: DataFrame) -> Any:
        return waits("EventTime")(stream.dropDuplicatesWithinWatermark(["k", "t"]))

    theirs, ours = run_both(spark, make_backend(), tmp_path, program, program)

    assert ours.batches == theirs.batches
    assert ("a", "timer 5", [5, 7, 8, 11, 12, 20]) in theirs.batches[1]
