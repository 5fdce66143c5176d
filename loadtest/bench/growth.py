"""
The cost of large state and large batches: ``python -m loadtest.bench.growth [--only growth,memory] [--short]``.

Growth: one query whose state grows from 100,000 to 10 million keys; at each size, batches of 200,000 rows touch 100,000
keys spread evenly over the table, so that only the size differs. Memory: one batch of 5 million rows in one partition,
among them a key with a million rows, with 1 GB for the Python worker.

Prints the curve and writes ``reports/bench-growth.json`` and ``reports/bench-growth.html``.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from loadtest.bench.measuring import measure, new_session, open_backend
from loadtest.bench.processors import TOTALS, Totals
from tools.reporting.figures import Figure, Goal, format_number
from tools.reporting.history import History
from tools.reporting.page import HtmlReport
from tools.reporting.plots import Series
from tools.reporting.target import TargetReport, is_set

ROWS = 200_000
KEYS_TOUCHED = 100_000
SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
MEASURED = 7
LEAST_SHARE = 0.6
BIG_ROWS = 5_000_000
BIG_KEY_ROWS = 1_000_000
WORKER_MB_MAX = 1024
PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of batches: `keys` are added from `first_key` on, or if there are none, existing ones are touched."""

    first_batch: int
    batches: int
    first_key: int
    keys: int
    size: int


def stages(sizes: Sequence[int], rows: int, measured: int) -> list[Stage]:
    """Return the stages that fill the state up to each size, and those that measure there."""
    result: list[Stage] = []
    batch = size = 0
    for wanted in sizes:
        fill = -(-(wanted - size) // rows)
        result.append(Stage(batch, fill, size, wanted - size, wanted))
        result.append(Stage(batch + fill, measured, 0, 0, wanted))
        batch, size = batch + fill + measured, wanted
    return result


def key_of(plan: Sequence[Stage], rows: int, touched: int) -> str:
    """Return the SQL expression of a row's key, from the source's number `value`."""
    cases = []
    for stage in plan:
        number = f"(value - {stage.first_batch * rows})"
        stride = stage.size // touched
        key = (
            f"{stage.first_key} + pmod({number}, {stage.keys})"
            if stage.keys
            else f"pmod(pmod({number} * 7919, {touched}) * {stride} + (value div {rows}) * 31, {stage.size})"
        )
        cases.append(f"when value < {(stage.first_batch + stage.batches) * rows} then {key}")
    return f"cast(case {' '.join(cases)} else 0 end as int)"


def growth(
    spark: SparkSession, folder: Path, sizes: Sequence[int], rows: int, touched: int, measured: int = MEASURED
) -> tuple[list[Figure], list[History]]:
    """Measure rows/s at each size of the state."""
    plan = stages(sizes, rows, measured)
    last = plan[-1].first_batch + plan[-1].batches
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2).load()
    stream = rate.select(F.expr(key_of(plan, rows, touched)).alias("k"), F.col("value").cast("double").alias("v"))

    with open_backend(folder, PARTITIONS) as backend:
        result = backend.transform_with_state(stream.groupBy("k"), Totals(), TOTALS, "Update", "None")
        times = measure(result.writeStream, folder, 0, last)
    points = []
    for stage in plan[1::2]:
        taken = [times[batch] for batch in range(stage.first_batch + 1, stage.first_batch + stage.batches)]
        points.append((float(stage.size), rows / statistics.median(taken) * 1000))
        print(f"{stage.size:>12,} keys  {points[-1][1]:>9,.0f} rows/s", flush=True)
    figures = [Figure(f"rows/s at {format_number(size)} keys", speed, "rows/s") for size, speed in points]
    share = points[-1][1] / points[0][1]
    figures.append(Figure("speed at the largest state / at the smallest", share, "ratio", Goal(">=", LEAST_SHARE)))
    page = HtmlReport("Cost of growth", f"Batches of {rows:,} rows on {touched:,} keys, at growing numbers of keys.")
    history = History("Speed by size of the state", "keys", "rows/s", (Series("rows/s", points),))
    page.add_plot(history.svg())
    page.add_figures(figures)
    page.write(Path("reports/bench-growth.html"))
    return figures, [history]


class Counting(StatefulProcessor):
    """Keeps a list with an element per row, and yields the worker's peak memory."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._count = handle.getValueState("count", "n long")
        self._seen = handle.getListState("seen", "v double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Append every row of the large key, and count all rows."""
        n = 0
        for row in rows:
            n += 1
            if key[0] == 0:
                self._seen.appendValue((row.v,))
        self._count.update((n,))
        yield Row(k=key[0], n=n, peak_kb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def close(self) -> None:
        """Nothing to close."""


def memory(spark: SparkSession, folder: Path, rows: int, key_rows: int) -> list[Figure]:
    """Run one batch of `rows` in one partition, `key_rows` of them of one key; return the worker's peak memory."""
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2).load()
    key = f"if(value % {rows // key_rows} = 0, 0, cast(value as int))"
    stream = rate.select(F.expr(key).alias("k"), F.col("value").cast("double").alias("v"))
    found: list[Row] = []

    def save(batch: DataFrame, _: int) -> None:
        found.append(batch.agg(F.sum("n").alias("rows"), F.max("n").alias("most"), F.max("peak_kb")).collect()[0])

    with open_backend(folder, 1) as backend:
        result = backend.transform_with_state(
            stream.groupBy("k"), Counting(), "k int, n long, peak_kb long", "Update", "None"
        )
        writer = result.writeStream.foreachBatch(save).option("checkpointLocation", str(folder / "checkpoint"))
        writer.trigger(once=True).start().awaitTermination()
    [(seen, most, peak_kb)] = found
    print(f"{seen:,} rows in one partition, {most:,} of one key: worker at most {peak_kb / 1024:,.0f} MB", flush=True)
    return [
        Figure("rows of the partition", seen, "rows", Goal(">=", rows)),
        Figure("rows of the largest key", most, "rows", Goal(">=", key_rows)),
        Figure("peak memory of the worker", peak_kb / 1024, "MB", Goal("<=", WORKER_MB_MAX)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected measurements; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure the cost of large state and large batches.")
    parser.add_argument("--only", default="growth,memory", help="growth, memory or both")
    parser.add_argument("--short", action="store_true", default=is_set("SHORT"))
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - {"growth", "memory"}):
        parser.error(f"unknown measurement {', '.join(unknown)}; choose from growth and memory")
    scale = 100 if options.short else 1
    report = TargetReport("bench-growth")
    folder = Path(tempfile.mkdtemp(prefix="dstl-growth-"))
    spark = new_session(folder)
    figures, histories = list[Figure](), list[History]()
    try:
        if "growth" in wanted:
            sizes = [size // scale for size in SIZES]
            figures, histories = growth(spark, folder / "growth", sizes, ROWS // scale, KEYS_TOUCHED // scale)
        if "memory" in wanted:
            figures += memory(spark, folder / "memory", BIG_ROWS // scale, BIG_KEY_ROWS // scale)
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return report.write(figures, histories)


if __name__ == "__main__":
    sys.exit(main())
