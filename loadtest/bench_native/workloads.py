"""The workloads: rows, operators of both sides, and the required ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend, join_streams
from backend_client.columnar import Aggregate, Count, Deduplicate, Sum, sliding

SPARK, DSTL, FLOOR = "Spark", "DSTL", "floor"
BATCH_MS = 10_000
"""By how much event time advances per batch."""
WINDOW_S, SLIDE_S, WAIT_S = 100, 10, 60

Run = Callable[[SparkSession, int, ChangelogStateBackend], Any]
"""
Returns one side's query over batches of a number of rows; only this project's side uses the backend.

The floor's is only its rows: `floor` follows in each batch, because Spark sorts no stream.
"""


@dataclass(frozen=True, slots=True)
class Workload:
    """
    A line of the table.

    Args:
        name: For ONLY=.
        title: What a batch does.
        rows: Rows of a batch.
        sides: The queries that are compared, by side.
        goal: The least ratio of Spark's median to this project's; None to report it only.
        output_mode: Of Spark's side.
        compared: Columns or expressions of the output that must be equal on both sides, batch by batch; a mapping where
            they differ by side.
        floor_goal: The greatest ratio of this project's median to the floor's; None without a floor.
    """

    name: str
    title: str
    rows: int
    sides: Mapping[str, Run]
    goal: float | None
    compared: Mapping[str, tuple[str, ...]]
    output_mode: str = "update"
    floor_goal: float | None = None


def stream(spark: SparkSession, rows: int) -> DataFrame:
    """
    Return a stream of `rows` rows per batch.

    Columns: `value` counts all rows; `batch` the batches; `number` those of a batch; `v` is a double; `at` is an event
    time within the batch's `BATCH_MS`, the same however the rows are read.
    """
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    rate = rate.option("startTimestamp", 1_000_000_000).option("advanceMillisPerBatch", BATCH_MS)
    batch = F.floor(F.col("value") / rows)
    # Multiplying by an odd number permutes the values: neighbours get distant keys and times.
    spread = F.pmod(F.col("value") * 7919, F.lit(BATCH_MS))
    return rate.load().select(
        "value",
        batch.alias("batch"),
        (F.col("value") - batch * rows).alias("number"),
        F.col("value").cast("double").alias("v"),
        F.timestamp_millis(1_000_000_000 + batch * BATCH_MS + spread).alias("at"),
    )


def _keyed(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    return stream(spark, rows).select(F.pmod(F.col("value") * 7919, F.lit(keys)).cast("int").alias("k"), "v", "at")


def _numbers(spark: SparkSession, rows: int) -> DataFrame:
    return _keyed(spark, rows, rows).select("k", "v")


def _totals() -> dict[str, Run]:
    """Return count and sum over as many keys as a batch has rows: each batch changes all of them."""
    return {
        SPARK: lambda spark, rows, _: (
            _numbers(spark, rows).groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("s"))
        ),
        DSTL: lambda spark, rows, backend: backend.transform_columns(
            _numbers(spark, rows).groupBy("k"), Aggregate(Count(name="n"), Sum("v", name="s"))
        ),
    }


def _pass_on(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each row as if it were its key's result."""
    for batch in batches:
        key, value = batch.column(0), batch.column(1)
        yield pa.RecordBatch.from_arrays([key, pc.cast(key, pa.int64()), value], ["k", "n", "s"])


def floor(batch: DataFrame) -> DataFrame:
    """Return the least that a stateful operator in Python needs of Spark: one shuffle, one sort, one function."""
    moved = batch.repartition("k").sortWithinPartitions("k")
    return moved.mapInArrow(_pass_on, "k int, n long, s double")


def _windows(keys: int) -> dict[str, Run]:
    """Return count and sum in windows of which each record is in ten."""

    def rows_of(spark: SparkSession, rows: int) -> DataFrame:
        return _keyed(spark, rows, min(keys, rows)).withWatermark("at", "10 seconds")

    windows = sliding("at", timedelta(seconds=WINDOW_S), timedelta(seconds=SLIDE_S))
    return {
        SPARK: lambda spark, rows, _: (
            rows_of(spark, rows)
            .groupBy("k", F.window("at", f"{WINDOW_S} seconds", f"{SLIDE_S} seconds").alias("w"))
            .agg(F.count("*").alias("n"), F.sum("v").alias("s"))
        ),
        DSTL: lambda spark, rows, backend: backend.transform_columns(
            rows_of(spark, rows).groupBy("k"), Aggregate(Count(name="n"), Sum("v", name="s"), windows=windows)
        ),
    }


def _repeated(spark: SparkSession, rows: int) -> DataFrame:
    """Return rows whose keys come twice in a batch; half of the keys come in the batch before, too."""
    half = rows // 2
    key = F.col("batch") * (half // 2) + F.pmod("number", F.lit(half))
    return stream(spark, rows).select(key.alias("k"), "v", "at").withWatermark("at", f"{WAIT_S} seconds")


DEDUPLICATION: dict[str, Run] = {
    SPARK: lambda spark, rows, _: _repeated(spark, rows).dropDuplicatesWithinWatermark(["k"]),
    DSTL: lambda spark, rows, backend: backend.transform_columns(
        _repeated(spark, rows).groupBy("k"), Deduplicate("at", timedelta(seconds=WAIT_S)), outputMode="Append"
    ),
}


def _sides_of_join(spark: SparkSession, rows: int) -> tuple[DataFrame, DataFrame]:
    """Return two streams of `rows` / 2 rows each; half of the second one's rows meet one of the batch before."""
    each = rows // 2
    left = stream(spark, each).select(F.col("value").alias("k"), "v", "at").withWatermark("at", "10 seconds")
    key = F.col("value") - each // 2
    right = stream(spark, each).select(key.alias("k"), (F.col("v") * 2).alias("v"), "at")
    return left, right.withWatermark("at", "10 seconds")


def _native_join(spark: SparkSession, rows: int, _: ChangelogStateBackend) -> DataFrame:
    left, right = _sides_of_join(spark, rows)
    wait = F.expr(f"INTERVAL {WAIT_S} SECONDS")
    meets = F.col("r.at").between(F.col("l.at") - wait, F.col("l.at") + wait)
    joined = left.alias("l").join(right.alias("r"), (F.col("l.k") == F.col("r.k")) & meets)
    return joined.select(F.col("l.k").alias("k"), F.col("l.v").alias("lv"), F.col("r.v").alias("rv"))


def _own_join(spark: SparkSession, rows: int, backend: ChangelogStateBackend) -> Any:
    left, right = _sides_of_join(spark, rows)
    joined = join_streams(backend, {"l": left, "r": right}, on="k", wait=f"{WAIT_S} seconds", columnar=True)
    return joined.select("k", F.col("l.v").alias("lv"), F.col("r.v").alias("rv"))


_TOTALS = {SPARK: ("k", "n", "s"), DSTL: ("k", "n", "s")}
_IN_WINDOWS = {SPARK: ("k", "w.start", "w.end", "n", "s"), DSTL: ("k", "window_start", "window_end", "n", "s")}

WORKLOADS = (
    Workload("totals", "groupBy().agg(count, sum), 200,000 rows on 200,000 keys", 200_000, _totals(), 2.0, _TOTALS),
    Workload(
        "small",
        "groupBy().agg(count, sum), 1,000 rows on 1,000 keys",
        1_000,
        {**_totals(), FLOOR: lambda spark, rows, _: _numbers(spark, rows)},
        1.1,
        _TOTALS,
        floor_goal=1.2,
    ),
    Workload(
        "windows", "sliding windows, 200,000 rows in 10 each, 1,000 keys", 200_000, _windows(1_000), 2.0, _IN_WINDOWS
    ),
    Workload(
        "many-windows",
        "sliding windows, 200,000 rows in 10 each, 20,000 keys",
        200_000,
        _windows(20_000),
        2.0,
        _IN_WINDOWS,
    ),
    Workload(
        "deduplication",
        "dropDuplicatesWithinWatermark, 200,000 rows on 100,000 keys",
        200_000,
        DEDUPLICATION,
        1.3,
        {SPARK: ("k",), DSTL: ("k",)},  # of equal keys within a batch either side may pass any row
        output_mode="append",
    ),
    Workload(
        "join",
        "inner join of two streams of 100,000 rows",
        200_000,
        {SPARK: _native_join, DSTL: _own_join},
        1.2,
        {SPARK: ("k", "lv", "rv"), DSTL: ("k", "lv", "rv")},
        output_mode="append",
    ),
)
