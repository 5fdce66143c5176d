"""
Run the workloads: ``python -m loadtest.bench_native [--only NAME,NAME] [--short] [--strict]``.

Each line runs the same work over the same rows with Spark's native operators, which run in the JVM on its RocksDB
state store with changelog checkpointing, and with the ready-made columnar ones, in turn, in one session on one disk.
The first batches' output of both must be equal. Spark's settings, with the reason for each, are in ``spark.conf``.
Prints the table and writes ``reports/bench-native.json``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from loadtest.bench_native.rounds import SHORT, Extent, Result, measure
from loadtest.bench_native.settings import PATH, spark_settings
from loadtest.bench_native.workloads import DSTL, FLOOR, SPARK, WORKLOADS, Workload
from tools.reporting.figures import Figure, Goal, format_number
from tools.reporting.target import TargetReport, chosen_options
from tools.spark_session import start_session

SHORT_ROWS = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected workloads; return the exit code."""
    names = [workload.name for workload in WORKLOADS]
    wanted, short, strict = chosen_options("Compare with Spark's native operators.", names, arguments, "few rows")
    report, exit_code = TargetReport("bench-native", strict=strict), 0
    folder = Path(tempfile.mkdtemp(prefix="dstl-bench-"))
    settings = {
        setting.name.removeprefix("spark."): setting.value
        for setting in spark_settings(PATH.read_text(encoding="utf-8"))
    }
    settings |= {"sql.shuffle.partitions": "1"} if short else {}
    spark = start_session("dstl-bench-native", settings, folder=folder)
    figures: list[Figure] = []
    try:
        for workload in WORKLOADS:
            if workload.name in wanted:
                print(workload.title, flush=True)
                figures += figures_of(workload, _measured(spark, workload, folder / workload.name, short=short))
                exit_code = report.write(figures)  # after each one, so that a later failure keeps the known figures
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return exit_code


def _measured(spark: SparkSession, workload: Workload, folder: Path, *, short: bool) -> Result | None:
    """Return a workload's result; None if it failed, so that the others still run."""
    rows = min(workload.rows, SHORT_ROWS) if short else workload.rows
    try:
        return measure(spark, workload, folder, SHORT if short else Extent(), rows)
    except Exception:  # noqa: BLE001 - after any error the other lines still run
        traceback.print_exc()
        return None


def figures_of(workload: Workload, result: Result | None) -> list[Figure]:
    """Return a workload's figures, and print them; those of one that failed have no values."""
    medians: Mapping[str, float] = result.medians if result is not None else {}
    figures = [Figure(f"{workload.title}: {side}, median trigger", medians.get(side), "ms") for side in workload.sides]
    goal = None if workload.goal is None else Goal(">=", workload.goal)
    figures.append(Figure(f"{workload.title}: Spark / DSTL", _ratio(medians, SPARK, DSTL), "ratio", goal))
    if workload.floor_goal is not None:
        ratio = _ratio(medians, DSTL, FLOOR)
        figures.append(Figure(f"{workload.title}: DSTL / floor", ratio, "ratio", Goal("<=", workload.floor_goal)))
    differing = None if result is None else result.differing
    figures.append(Figure(f"{workload.title}: output rows that differ", differing, "rows", Goal("==", 0)))
    for figure in figures:
        verdict = "" if figure.goal is None else f"{figure.goal}  {'holds' if figure.holds else 'MISSED'}"
        print(
            f"  {figure.name.partition(': ')[2]:26} {format_number(figure.value):>8} {figure.unit:5}  {verdict}",
            flush=True,
        )
    return figures


def _ratio(medians: Mapping[str, float], over: str, under: str) -> float | None:
    return medians[over] / medians[under] if over in medians and under in medians else None


if __name__ == "__main__":
    sys.exit(main())
