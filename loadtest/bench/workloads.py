"""The workloads: rows, operators of both sides, and the required ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Sum
from loadtest.bench.processors import (
    OUTPUT,
    TOTALS,
    Appends,
    MapUpdates,
    PandasTotals,
    Sizes,
    Timers,
    Totals,
)

Side = Literal["Spark", "DSTL"]
Run = Callable[[DataFrame, ChangelogStateBackend | None], Any]
"""Applies operators to a stream: the backend's, or without one Spark's own; the result has a ``writeStream``."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of Spark's APIs, and the one of this backend compared with it; without a goal it is only reported."""

    name: str
    spark: Run
    ours: Run
    goal: float | None


@dataclass(frozen=True, slots=True)
class Workload:
    """A line of the table: a name for ONLY=, a title, rows and keys of a batch, partitions, and comparisons."""

    name: str
    title: str
    rows: int
    keys: int
    comparisons: tuple[Comparison, ...]
    partitions: int = 4
    output_mode: str = "update"
    with_time: bool = False


def rows(processor: Callable[[], Any], output: str, time_mode: str = "None", mode: str = "Update") -> Run:
    """Return an operator of the Row API."""

    def run(frame: DataFrame, backend: ChangelogStateBackend | None) -> Any:
        grouped = frame.groupBy("k")
        if backend is None:
            return grouped.transformWithState(processor(), output, mode, time_mode)
        return backend.transform_with_state(grouped, processor(), output, mode, time_mode)

    return run


def pandas(frame: DataFrame, backend: ChangelogStateBackend | None) -> Any:
    """Apply count and sum in the pandas API to a stream."""
    grouped = frame.groupBy("k")
    if backend is None:
        return grouped.transformWithStateInPandas(PandasTotals(), TOTALS, "Update", "None")
    return backend.transform_with_state_in_pandas(grouped, PandasTotals(), TOTALS, "Update", "None")


def columns(frame: DataFrame, backend: ChangelogStateBackend | None) -> Any:
    """Apply count and sum in the columnar API to a stream."""
    assert backend is not None
    return backend.transform_columns(frame.groupBy("k"), Aggregate(Count(name="n"), Sum("v", name="s")))


def timers(frame: DataFrame, backend: ChangelogStateBackend | None) -> Any:
    """Apply timers to a stream with a watermark."""
    return rows(Timers, OUTPUT, "EventTime")(frame.withWatermark("timestamp", "0 seconds"), backend)


def chain(frame: DataFrame, backend: ChangelogStateBackend | None) -> Any:
    """Apply a chain of two operators to a stream."""
    first = rows(Totals, TOTALS, mode="Append")(frame, backend)
    return rows(Sizes, OUTPUT, mode="Append")(first.withColumn("k", (F.col("k") % 1000).cast("int")), backend)


def _row_api(processor: Callable[[], Any], output: str, goal: float) -> Comparison:
    run = rows(processor, output)
    return Comparison("Row API", run, run, goal)


def _totals(row_goal: float, pandas_goal: float) -> tuple[Comparison, ...]:
    """Count and sum: ours against both of Spark's APIs; and the two pandas APIs, which mostly wait for pandas."""
    run = rows(Totals, TOTALS)
    return (
        Comparison("Row API", run, run, row_goal),
        Comparison("Row API, Spark's pandas API", pandas, run, pandas_goal),
        Comparison("pandas API", pandas, pandas, None),
    )


WORKLOADS = (
    Workload(
        "many-keys",
        "200,000 rows, 200,000 keys, one get and one update per key",
        200_000,
        200_000,
        _totals(15, 40),
    ),
    Workload(
        "few-keys",
        "200,000 rows, 20,000 keys",
        200_000,
        20_000,
        _totals(5, 20),
    ),
    Workload(
        "list", "list state, append 1 element per row, 20,000 keys", 200_000, 20_000, (_row_api(Appends, OUTPUT, 8),)
    ),
    Workload(
        "map",
        "map state, 10 entries per key, update 1, read 3",
        100_000,
        20_000,
        (_row_api(MapUpdates, OUTPUT, 8),),
    ),
    Workload(
        "timers",
        "timers: one event-time timer per key registered and expired, 200,000 keys",
        200_000,
        200_000,
        (Comparison("Row API", timers, timers, 8),),
        with_time=True,
    ),
    Workload(
        "columnar",
        "columnar count+sum, 200,000 rows, 200,000 keys",
        200_000,
        200_000,
        (Comparison("Row API", rows(Totals, TOTALS), columns, 40),),
    ),
    Workload(
        "small",
        "small batches: 1,000 rows, 1,000 keys, 8 partitions",
        1_000,
        1_000,
        _totals(1.3, 1.3),
        partitions=8,
    ),
    Workload(
        "chain",
        "two operators in a chain, 200,000 rows, 200,000 keys and then 1,000",
        200_000,
        200_000,
        (Comparison("Row API", chain, chain, 8),),
        output_mode="append",
    ),
)
