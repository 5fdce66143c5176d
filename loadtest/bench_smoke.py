"""
Spark's own ``transformWithState`` and this backend, side by side: the same processor, the same rows, one run.

Each workload streams batches of a fixed size from Spark's rate source through one operator into the noop sink, first
with Spark's operator (Row API, RocksDB state store, changelog checkpointing on), then with this backend, on the same
disk. The first batches warm both up; the median of the following ones counts.

``python -m loadtest.bench_smoke [--only NAME]`` prints a table and writes ``reports/bench-smoke.json``.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from loadtest.bench.measuring import measure, new_session, new_stream, open_backend
from loadtest.bench.processors import TOTALS, Totals
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows and keys of a batch, partitions, and the minimum ratio of Spark's batch time to this backend's."""

    name: str
    rows: int
    keys: int
    partitions: int
    goal: float


WORKLOADS = (
    Workload("200k rows, 200k keys", 200_000, 200_000, 4, 8.0),
    Workload("200k rows, 20k keys", 200_000, 20_000, 4, 3.0),
    Workload("1k rows, 1k keys", 1_000, 1_000, 4, 1.0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare with Spark's own transformWithState.")
    parser.add_argument("--only", help="run the workloads whose name contains this text")
    options = parser.parse_args(arguments)
    report = TargetReport("bench-smoke")
    folder = Path(tempfile.mkdtemp(prefix="dstl-bench-"))
    spark = new_session(folder)
    figures: list[Figure] = []
    try:
        for number, workload in enumerate(WORKLOADS):
            if options.only is None or options.only in workload.name:
                figures += compare(spark, workload, folder / str(number))
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return report.write(figures)


def compare(spark: SparkSession, workload: Workload, folder: Path) -> list[Figure]:
    """Run one workload on both sides and print the line of the table."""
    theirs = run_spark(spark, workload, folder / "spark")
    ours = run_backend(spark, workload, folder / "dstl")
    ratio = statistics.median(theirs) / statistics.median(ours)
    rows_per_s = workload.rows / statistics.median(ours) * 1000
    print(
        f"{workload.name:22}  Spark {statistics.median(theirs):8.0f} ms  DSTL {statistics.median(ours):7.0f} ms  "
        f"{rows_per_s:9.0f} rows/s  ratio {ratio:5.2f}  (goal {workload.goal:.0f})   "
        f"Spark {theirs}  DSTL {ours}",
        flush=True,
    )
    return [
        Figure(f"{workload.name}: Spark, median trigger", statistics.median(theirs), "ms"),
        Figure(f"{workload.name}: DSTL, median trigger", statistics.median(ours), "ms"),
        Figure(f"{workload.name}: Spark / DSTL", ratio, "ratio", Goal(">=", workload.goal)),
    ]


def run_spark(spark: SparkSession, workload: Workload, folder: Path) -> list[int]:
    """Return the trigger times (ms) of the measured batches of Spark's own operator."""
    out = new_stream(spark, workload.rows, workload.keys).groupBy("k")
    result = out.transformWithState(
        statefulProcessor=Totals(), outputStructType=TOTALS, outputMode="Update", timeMode="None"
    )
    return measure(result.writeStream.outputMode("update"), folder)


def run_backend(spark: SparkSession, workload: Workload, folder: Path) -> list[int]:
    """Return the trigger times (ms) of the measured batches of this backend."""
    with open_backend(folder, workload.partitions) as backend:
        result = backend.transform_with_state(
            new_stream(spark, workload.rows, workload.keys).groupBy("k"),
            statefulProcessor=Totals(),
            outputStructType=TOTALS,
            outputMode="Update",
            timeMode="None",
        )
        return measure(result.writeStream.outputMode("update"), folder)


if __name__ == "__main__":
    sys.exit(main())
