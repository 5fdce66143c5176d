"""
The join of several streams, compared with Spark's own joins of two streams and, for three, with its definition.

A failure means that a join emits other rows than SQL defines.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend, join_streams
from backend_client.progress import BatchProgress
from storage.errors import InvalidInputError
from tests.e2e.support import Collected, read_input, run_to_end
from tests.property.backend_client.test_stream_join_properties import joined as combinations

pytestmark = pytest.mark.spark

SCHEMA = "k string, n int, t timestamp, id long, more struct<name: string, tags: array<string>, n: map<string, int>>"
START_S = 1_700_000_000
DELAY = "20 seconds"
COLUMNS = ("k", "n", "l.t", "l.id", "l.more", "r.t", "r.id", "r.more")


def write_files(folder: Path, numbers: range, seed: int, last: int, late_from: int = 100, count: int = 16) -> None:
    """
    Write a file of random rows for each number, each ten seconds after the previous one.

    From a file on, some rows are far behind the watermark, however the batches are cut. The last two files move it past
    all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        chance = random.Random(1000 * seed + number)

        def row(key: Any, second: float, row_id: int) -> dict[str, Any]:
            moment = datetime.fromtimestamp(START_S + second, UTC).isoformat(timespec="microseconds")
            more = {"name": f"row {row_id}", "tags": ["x"] * (row_id % 3), "n": {"a": row_id}} if row_id % 4 else None
            return {"k": key, "n": row_id % 2, "t": moment, "id": row_id, "more": more}

        rows = []
        for position in range(count if number < last - 1 else 0):
            late = number >= late_from and chance.random() < 0.25
            second = 10 * number + (-300 if late else chance.choice([chance.randrange(10), chance.random() * 10]))
            rows.append(row(chance.choice(["a", "b", "c", "d", None]), second, 100 * number + position))
        rows.append(row("clock", 10 * number + (500 if number >= last - 1 else 9), 100 * number + 99))
        path = folder / f"{number:05d}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.utime(path, (START_S + number, START_S + number))


def read(spark: SparkSession, folder: Path) -> DataFrame:
    return read_input(spark, folder, SCHEMA).withWatermark("t", DELAY)


def spark_join(left: DataFrame, right: DataFrame, how: str) -> DataFrame:
    """Join with Spark's own operator: a left row waits for ten seconds, a right one for four and a half."""
    condition = F.expr(
        "l.k = r.k and l.n = r.n and "
        "r.t <= l.t + interval 10 seconds and l.t <= r.t + interval 4 seconds 500 milliseconds"
    )
    key = [F.coalesce(f"l.{name}", f"r.{name}").alias(name) for name in "kn"]
    return left.alias("l").join(right.alias("r"), condition, how).select(*key, *COLUMNS[2:])


def all_rows(seen: Collected) -> list[tuple[Any, ...]]:
    return sorted((row for rows in seen.batches.values() for row in rows), key=repr)


@pytest.mark.parametrize("how", ["inner", "left", "full"])
def test_join_of_two_streams_is_spark_s(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path, how: str
) -> None:
    """
    I14: duplicates, nulls, late rows and composite keys are joined as on Spark, over a restart with rescaling.

    The columnar join of the same rows, whose columns have simple types, has the same output.
    """
    theirs, progress = Collected(), dict[str, list[BatchProgress]]()
    ours = {job: Collected() for job in (["rows", "columns"] if how == "inner" else ["rows"])}
    for part, numbers in enumerate((range(2), range(2, 5))):
        write_files(tmp_path / "left", numbers, seed=1, last=4, late_from=2, count=24)
        write_files(tmp_path / "right", numbers, seed=2, last=4, late_from=2, count=24)
        left, right = read(spark, tmp_path / "left"), read(spark, tmp_path / "right")
        if how == "full":
            # A null in a key equals a null in Spark's full outer join of streams, and in no other join of it.
            left, right = left.where("k is not null"), right.where("k is not null")
        run_to_end(spark_join(left, right, how).writeStream, tmp_path / "theirs", theirs)
        waits: dict[str, str | timedelta] = {"l": "10 seconds", "r": timedelta(seconds=4.5)}
        for job, seen in ours.items():
            columnar = job == "columns"
            if columnar:
                left, right = (side.withColumn("more", F.col("more.name")) for side in (left, right))
            heard = progress.setdefault(job, [])
            backend = make_backend(job, parallelism=2 + part, on_progress=heard.append)
            inputs = {"l": left, "r": right}
            result = join_streams(backend, inputs, on=["k", "n"], how=how, wait=waits, columnar=columnar)
            run_to_end(result.select(*COLUMNS).writeStream, tmp_path / job, seen)

    expected = all_rows(theirs)
    assert all_rows(ours["rows"]) == expected
    if how == "inner":
        at = [place for place, column in enumerate(COLUMNS) if column.endswith(".more")]
        simple = [tuple(cell and cell.name if n in at else cell for n, cell in enumerate(row)) for row in expected]
        assert all_rows(ours["columns"]) == sorted(simple, key=repr)
    assert len(expected) > 30
    assert all(sum(batch.late_rows for batch in batches) > 0 for batches in progress.values())


class PassOn(StatefulProcessor):
    """An operator after the join that yields the rows it receives; late rows are missing."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        return (Row(k=row.k, ids=json.dumps([row.a, row.b, row.c])) for row in rows)

    def close(self) -> None:
        pass


def test_join_of_three_streams_reaches_next_operator(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """Three inputs with different columns: a second operator of the chain sees exactly the rows of the definition."""
    columns = {"a": ["k", "t", "id"], "b": ["id", "k", "t", "more"], "c": ["t", "id", "k", "n"]}
    known: dict[str, list[tuple[int, int, int]]] = {}
    for position, label in enumerate(columns):
        write_files(tmp_path / label, range(5), seed=10 + position, last=4)
        for file in (tmp_path / label).iterdir():
            for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                micros = round(datetime.fromisoformat(row["t"]).timestamp() * 1_000_000)
                if row["k"] not in (None, "clock"):
                    known.setdefault(row["k"], []).append((position, micros, row["id"]))
    backend = make_backend()
    inputs = {label: read(spark, tmp_path / label).select(*names) for label, names in columns.items()}
    joined = join_streams(backend, inputs, on="k", how="full", wait="3 seconds", event_time="at")
    ids = joined.select("k", "at", *(F.col(f"{label}.id").alias(label) for label in columns))
    result = backend.transform_with_state(ids.groupBy("k"), PassOn(), "k string, ids string", "Append", "EventTime")
    seen = Collected()
    run_to_end(result.writeStream, tmp_path / "checkpoint", seen)

    expected = [
        (key, json.dumps(list(combination)))
        for key, rows in known.items()
        for combination in combinations("full", rows, [3_000_000] * 3)
    ]
    assert [row for row in all_rows(seen) if row[0] not in (None, "clock")] == sorted(expected)
    assert len(expected) > 100


def test_days_of_a_wait_have_24_hours(
    spark: SparkSession, make_backend: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where clocks are set forward within 120 days of 1970: rows that came in the last hour met nothing."""
    write_files(tmp_path / "input", range(1), seed=1, last=9)
    stream = read(spark, tmp_path / "input").drop("more")
    before = str(spark.conf.get("spark.sql.session.timeZone"))
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        joined = join_streams(make_backend(), {"l": stream, "r": stream}, on="k", wait="120 days", columnar=True)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)

    joined.explain()
    assert f"waiting {120 * 24 * 3600} s" in capsys.readouterr().out


def test_impossible_join_is_refused(spark: SparkSession, make_backend: Callable[..., Any], tmp_path: Path) -> None:
    """Each invalid argument is an error that names the remedy, before the query starts."""
    write_files(tmp_path / "input", range(1), seed=1, last=9)
    backend, stream = make_backend(), read(spark, tmp_path / "input")
    plain = read_input(spark, tmp_path / "input", SCHEMA)
    good: dict[str, Any] = {"inputs": {"l": stream, "r": stream}, "on": "k", "wait": "1 minute"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"how": "right"}, "how must be one of inner, left, full"),
        ({"inputs": {"l": stream}}, "at least two inputs"),
        ({"inputs": {"l": stream, "r": spark.range(3)}}, "'r' is not a stream"),
        ({"inputs": {"l": stream, "r": join_streams(backend, **good)}}, "put the operator after the join"),
        ({"inputs": {"l": stream, "r": plain}}, "Call withWatermark"),
        (
            {"inputs": {"l": stream, "r": plain.withColumn("u", F.col("t")).withWatermark("u", "1 second")}, "on": "x"},
            "'x'",
        ),
        ({"inputs": {"l": stream, "r": stream.withColumn("k", F.lit(1))}}, "int in input 'r'"),
        ({"inputs": dict.fromkeys("lr", stream.withColumn("k", F.expr("k collate UTF8_LCASE")))}, "other than UTF8"),
        ({"inputs": {"l": stream, "K": stream}}, "rename 'K'"),
        ({"on": []}, "on must name columns"),
        ({"wait": "soon"}, "non-negative duration"),
        ({"wait": timedelta(seconds=-1)}, "non-negative duration"),
        ({"wait": {"l": "1 minute"}}, "inputs are l, r"),
        ({"columnar": True, "how": "left"}, "two inputs with how='inner'"),
        ({"columnar": True}, "cannot hold 'more'"),
    ]
    for change, message in cases:
        with pytest.raises(InvalidInputError, match=message):
            join_streams(backend, **{**good, **change})
