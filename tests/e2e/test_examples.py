"""
The small examples, interrupted in the middle, compared with batch computations of the same answers.

A failure means that an example shows a wrong result, or that its state did not survive a restart.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from examples import common, fraud, revenue, sessions

pytestmark = pytest.mark.spark

MakeBackend = Callable[..., ChangelogStateBackend]


@pytest.fixture
def utc(spark: SparkSession) -> Any:
    """Make the session, like that of the examples, show times in UTC."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", str(before))


FILES = 3
"""With the two that end an example's input, which the second part has."""
PROGRAM = f"""
import functools, runpy
from examples import common
main = common.main
common.main = lambda text, write, build, show: main(text, functools.partial(write, files={FILES}), build, show)
runpy.run_module("examples.fraud", run_name="__main__")
"""


def run_in_two_parts(
    example: ModuleType, spark: SparkSession, make_backend: MakeBackend, folder: Path, **size: int
) -> pd.DataFrame:
    """Run an example over the first files, then over the others at another parallelism; return its output."""
    example.write_input(folder / "all", files=FILES, **size)
    files = sorted((folder / "all").iterdir())
    (folder / "input").mkdir()
    for parallelism, part in ((2, files[: FILES - 1]), (3, files[FILES - 1 :])):
        for file in part:
            shutil.copy2(file, folder / "input")
        common.run_to_end(example.build(spark, make_backend(parallelism=parallelism), folder / "input"), folder)
    assert example.show(common.read_output(folder))
    return common.read_output(folder)


def in_order(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows as Python values, sorted; times are in UTC, with or without a zone in the column's type."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list):  # what Spark 4.1 returns for an array
            return tuple(value)
        return value.tz_localize(None) if isinstance(value, pd.Timestamp) else value

    return sorted(tuple(map(plain, row)) for row in frame.itertuples(index=False))


def test_sessions_are_those_of_session_window(utc: SparkSession, make_backend: MakeBackend, tmp_path: Path) -> None:
    """Each session is emitted once, with the clicks that Spark's batch aggregation over session windows counts."""
    output = run_in_two_parts(sessions, utc, make_backend, tmp_path)
    clicks = utc.read.schema(sessions.CLICKS).json(str(tmp_path / "all")).where("user != 'next day'")
    windows = clicks.groupBy("user", F.session_window("time", "10 minutes").alias("w")).count()
    expected = windows.select("user", "w.start", "w.end", "count").toPandas()

    assert len(expected) > 400
    assert in_order(output) == in_order(expected)


def test_fraud_events_are_those_of_pandas(utc: SparkSession, make_backend: MakeBackend, tmp_path: Path) -> None:
    """Each rule finds what pandas finds over all payments at once, and each case is closed once."""
    output = run_in_two_parts(fraud, utc, make_backend, tmp_path)
    rows = pd.concat([pd.read_json(path, lines=True) for path in sorted((tmp_path / "all").iterdir())])
    rows["time"] = pd.to_datetime(rows["time"], utc=True, format="ISO8601")
    rows = rows.sort_values(["card", "time"], ignore_index=True)
    cards = rows.groupby("card")
    in_a_minute = rows.set_index("time").groupby("card")["cents"].rolling("60s").count().to_numpy()
    hours = cards["time"].diff().dt.total_seconds() / 3600
    north, east = (np.radians(rows[name]) for name in ("latitude", "longitude"))
    north_before, east_before = north.groupby(rows["card"]).shift(), east.groupby(rows["card"]).shift()
    half = np.sin((north - north_before) / 2) ** 2
    half += np.cos(north) * np.cos(north_before) * np.sin((east - east_before) / 2) ** 2
    far = 2 * 6371 * np.arcsin(np.sqrt(half))
    rate, travel = in_a_minute >= 5, (far > 100) & (far > 900 * hours)
    findings = pd.concat([rows[rate].assign(event="rate"), rows[travel].assign(event="travel")]).assign(findings=1)
    found = rows.assign(findings=rate.astype(int) + travel.astype(int))[rate | travel].copy()
    gap = found.groupby("card")["time"].diff() >= pd.Timedelta(minutes=10)
    found["case"] = gap.groupby(found["card"]).cumsum()
    cases = found.groupby(["card", "case"]).agg(
        time=("time", "max"), findings=("findings", "sum"), cents=("cents", "sum")
    )
    cases = cases.reset_index().assign(event="case", time=lambda case: case["time"] + pd.Timedelta(minutes=10))
    columns = ["card", "time", "event", "findings", "cents"]
    expected = pd.concat([findings[columns], cases[columns]])

    assert set(expected["event"]) == {"rate", "travel", "case"}
    assert in_order(output[columns]) == in_order(expected)


def test_revenue_is_that_of_a_batch(utc: SparkSession, make_backend: MakeBackend, tmp_path: Path) -> None:
    """Each window is emitted once, with the result of Spark's batch aggregation."""
    output = run_in_two_parts(revenue, utc, make_backend, tmp_path, orders=20_000)
    orders = utc.read.schema(revenue.ORDERS).json(str(tmp_path / "all")).where("product != 'next day'")
    windows = orders.groupBy("product", F.window("time", "15 minutes").alias("w")).agg(
        F.count("*").alias("orders"),
        F.sum("cents").alias("cents"),
        F.avg("cents").alias("mean_cents"),
        F.max("time").alias("last"),
        F.expr("slice(reverse(array_sort(collect_list(cents))), 1, 3)").alias("dearest"),
    )
    expected = windows.select("product", "w.*", *windows.columns[2:]).toPandas()

    assert len(expected) > 1500
    assert in_order(output) == in_order(expected)


def test_example_runs_as_program() -> None:
    """``python -m examples.fraud``, on few files, prints a result, and leaves no sidecar that keeps its output open."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)

    assert done.returncode == 0, done.stderr
    assert "The most expensive cases:" in done.stdout
