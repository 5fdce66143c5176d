"""
Run the workloads: ``python -m loadtest.bench [--only NAME,NAME] [--short] [--strict]``.

Each line runs the same work over the same rows on both sides, one after the other, on the same disk: first Spark's
operator (RocksDB state store with changelog), then this backend. Both are warmed up for the same time; the median of
the later batches counts. Prints the table and writes ``reports/bench.json``.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from loadtest.bench.measuring import measure, new_session, new_stream, open_backend
from loadtest.bench.workloads import WORKLOADS, Comparison, Run, Workload
from tools.reporting.figures import Figure, Goal, format_number
from tools.reporting.target import TargetReport, chosen_options

SHORT_ROWS = 500
WARM_UP_S = 60
MEASURED_BATCHES = 9
MEASURED_S = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected workloads; return the exit code."""
    names = [workload.name for workload in WORKLOADS]
    wanted, short, strict = chosen_options("Compare with Spark's own transformWithState.", names, arguments, "few rows")
    report, exit_code = TargetReport("bench", strict=strict), 0
    folder = Path(tempfile.mkdtemp(prefix="dstl-bench-"))
    spark = new_session(folder)
    figures: list[Figure] = []
    try:
        for workload in WORKLOADS:
            if workload.name in wanted:
                print(workload.title, flush=True)
                known: dict[tuple[str, Run], float | None] = {}
                for comparison in workload.comparisons:
                    figures += compare(spark, workload, comparison, folder / workload.name, known=known, short=short)
                    exit_code = report.write(figures)  # after each one, so that a later failure keeps the known figures
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return exit_code


def compare(
    spark: SparkSession,
    workload: Workload,
    comparison: Comparison,
    folder: Path,
    *,
    known: dict[tuple[str, Run], float | None],
    short: bool,
) -> list[Figure]:
    """
    Run one comparison and print its line; a failure becomes a figure without a value.

    `known` holds the medians of the workload's earlier comparisons, which are not measured again.
    """
    spark.conf.set("spark.sql.shuffle.partitions", str(_partitions(workload, short=short)))
    medians: dict[str, float | None] = {}
    for side, run in (("Spark", comparison.spark), ("DSTL", comparison.ours)):
        if (side, run) not in known:
            try:
                times = _times(spark, workload, run, folder / f"{side}-{len(known)}", side=side, short=short)
                known[side, run] = statistics.median(times)
            except Exception:  # noqa: BLE001 - after any error the other lines still run
                traceback.print_exc()
                known[side, run] = None
        medians[side] = known[side, run]
    theirs, ours = medians["Spark"], medians["DSTL"]
    ratio = theirs / ours if theirs is not None and ours is not None else None
    name = f"{workload.title}: {comparison.name}"
    goal = None if comparison.goal is None else Goal(">=", comparison.goal)
    figures = [
        Figure(f"{name}, Spark, median trigger", theirs, "ms"),
        Figure(f"{name}, DSTL, median trigger", ours, "ms"),
        Figure(f"{name}, Spark / DSTL", ratio, "ratio", goal),
    ]
    verdict = "" if goal is None else f"{goal}  {'holds' if figures[-1].holds else 'MISSED'}"
    print(
        f"  {comparison.name:27} Spark {format_number(theirs):>8} ms   DSTL {format_number(ours):>8} ms   "
        f"ratio {format_number(ratio):>6}  {verdict}",
        flush=True,
    )
    return figures


def _partitions(workload: Workload, *, short: bool) -> int:
    return 1 if short else workload.partitions


def _times(spark: SparkSession, workload: Workload, run: Run, folder: Path, *, side: str, short: bool) -> list[int]:
    rows, keys = workload.rows, workload.keys
    extent: dict[str, Any] = {"measured": MEASURED_BATCHES, "warm_up_s": WARM_UP_S, "measured_s": MEASURED_S}
    if short:
        rows, keys = min(rows, SHORT_ROWS), min(keys, SHORT_ROWS)
        extent = {"measured": 1}
    frame = new_stream(spark, rows, keys, with_time=workload.with_time)
    if side == "Spark":
        return measure(run(frame, None).writeStream.outputMode(workload.output_mode), folder, 1, **extent)
    with open_backend(folder, _partitions(workload, short=short)) as backend:
        writer = run(frame, backend).writeStream.outputMode(workload.output_mode)
        return measure(writer, folder, 1, **extent)


if __name__ == "__main__":
    sys.exit(main())
