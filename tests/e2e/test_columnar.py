"""
Columnar operators in Spark: over restarts, other parallelism, snapshots and lost tables, and by windows.

A failure means that columnar state is not what other state is: in the log, the snapshots and the table alike.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Deduplicate, Max, Sum, tumbling
from storage.errors import InvalidInputError
from tests.e2e.support import Collected, expected_output, random_input, read_input, run_to_end, write_input

pytestmark = pytest.mark.spark

TOTALS = Aggregate(Count(name="n"), Sum("v", name="s"))
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def test_state_moves_with_its_keys(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    local_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I14: output is that of plain Python over restarts, 2, 3 and 1 partitions, lost tables and snapshots."""
    monkeypatch.setenv("DSTL_MATERIALIZATION_ENABLED", "true")
    for name, value in (("INTERVAL_S", "1"), ("LOG_RATIO", "0"), ("LOG_FLOOR_BYTES", "1")):
        monkeypatch.setenv(f"DSTL_MATERIALIZATION_{name}", value)
    files = random_input(seed=5, batches=5, rows=400, keys=60)
    output = Collected()
    for parallelism, batches in ((2, 2), (3, 4), (1, 5)):
        write_input(tmp_path / "input", files[:batches])
        backend = make_backend(parallelism=parallelism, max_parallelism=16)
        grouped = read_input(spark, tmp_path / "input").groupBy("k")
        result = backend.transform_columns(grouped, TOTALS, name="totals")
        run_to_end(result.writeStream.outputMode("update"), tmp_path / "checkpoint", output)
        shutil.rmtree(local_dir / "tables", ignore_errors=True)
        for tables in local_dir.glob("*/tables"):
            shutil.rmtree(tables)

    assert output.batches == expected_output(files)


def test_operators_can_be_chained(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """A columnar operator reads another operator's output, with stateless steps between them."""
    files = random_input(seed=6, batches=2, rows=100, keys=20)
    write_input(tmp_path / "input", files)
    output = Collected()
    backend = make_backend()
    first = backend.transform_columns(read_input(spark, tmp_path / "input").groupBy("k"), TOTALS, name="keys")
    sizes = first.withColumn("many", F.col("n") > 5).groupBy("many")
    second = backend.transform_columns(sizes, Aggregate(Count(name="keys")), name="sizes")
    run_to_end(second.writeStream.outputMode("update"), tmp_path / "checkpoint", output)

    seen = {True: 0, False: 0}
    for batch, rows in expected_output(files).items():
        changed = {n > 5 for _, n, _ in rows}
        for _, n, _ in rows:
            seen[n > 5] += 1
        assert output.batches[batch] == sorted([(many, seen[many]) for many in changed], key=repr)


def test_names_have_any_characters(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """Column names may contain dots, backticks and spaces; PySpark's mapInArrow does not find such columns."""
    files = random_input(seed=8, batches=2, rows=50, keys=9)
    write_input(tmp_path / "input", files)
    output = Collected()
    rows = read_input(spark, tmp_path / "input").select(F.col("k").alias("a.b"), F.col("v").alias("c `d"))
    totals = Aggregate(Count(name="n.n"), Sum("c `d", name="s"))
    result = make_backend().transform_columns(rows.groupBy("`a.b`"), totals).select("`a.b`", "`n.n`", "s")
    run_to_end(result.writeStream.outputMode("update"), tmp_path / "checkpoint", output)

    assert output.batches == expected_output(files)


def write_events(folder: Path, batches: Sequence[Sequence[tuple[str, float]]]) -> None:
    """Write one JSON file of (key, seconds after BEGIN) per batch."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(batches):
        path = folder / f"{number:05d}.json"
        lines = [json.dumps({"k": key, "at": (BEGIN + second * SECOND).isoformat()}) for key, second in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def events(spark: SparkSession, folder: Path) -> DataFrame:
    return read_input(spark, folder, "k string, at timestamp").withWatermark("at", "5 seconds")


def seconds(value: Any) -> float:
    return float((value.astimezone(UTC) - BEGIN) / SECOND)


def test_windows_end_and_late_rows_are_dropped(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """Each window is emitted once, when Spark's watermark has passed it, also over a restart; late rows are counted."""
    batches = [
        [("a", 1), ("a", 9), ("b", 3), ("a", 11)],
        [("a", 2), ("b", 16)],  # the watermark was 6, so these are in time; it advances to 11
        [("a", 3), ("a", 12)],  # the first windows ended with the previous batch, and one row is late
        [("c", 40)],
        [("c", 41)],
    ]
    output = Collected()
    late_rows = []
    for part in (2, 5):
        write_events(tmp_path / "input", batches[:part])
        backend = make_backend(parallelism=part)
        grouped = events(spark, tmp_path / "input").groupBy("k")
        processor = Aggregate(Count(name="n"), windows=tumbling("at", 10 * SECOND))
        result = backend.transform_columns(grouped, processor, outputMode="Append")
        run_to_end(result.writeStream.outputMode("append"), tmp_path / "checkpoint", output)
        late_rows += [progress.late_rows for progress in backend.recent_progress]

    assert late_rows == [0, 0, 1, 0, 0]
    got = [
        (batch, key, seconds(begin), seconds(end), n)
        for batch, rows in sorted(output.batches.items())
        for key, begin, end, n in rows
    ]
    assert got == [(1, "a", 0, 10, 3), (1, "b", 0, 10, 1), (3, "a", 10, 20, 2), (3, "b", 10, 20, 1)]


def test_text_of_any_bytes_is_grouped_as_on_spark(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I14: text that is invalid UTF-8, as in casts of Kafka's values, is key and state like any other."""
    theirs, ours = Collected(), Collected()
    for part in (1, 3):
        write_events(tmp_path / "input", [[("FF", 1), ("61", 2)], [("FF", 3), ("FE", 4)], [("61", 100)]][:part])
        rows = events(spark, tmp_path / "input").withColumn("k", F.unhex("k").cast("string"))
        native = rows.groupBy("k", F.window("at", "10 seconds")).agg(F.count("*").alias("n"), F.max("k").alias("m"))
        run_to_end(native.selectExpr("hex(k)", "hex(m)", "n").writeStream, tmp_path / "theirs", theirs)
        processor = Aggregate(Count(name="n"), Max("k", name="m"), windows=tumbling("at", 10 * SECOND))
        result = make_backend().transform_columns(rows.groupBy("k"), processor, outputMode="Append")
        run_to_end(result.selectExpr("hex(k)", "hex(m)", "n").writeStream, tmp_path / "ours", ours)

    assert [row for rows in ours.batches.values() for row in rows] == [
        ("61", "61", 1),
        ("FE", "FE", 1),
        ("FF", "FF", 2),
    ]
    assert ours.batches[2] == theirs.batches[max(theirs.batches)]


def test_keys_that_python_lacks_are_grouped_as_on_spark(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I14: years beyond 9999, as of a last moment in a zone to the west, and any text beside decimals, in structs."""
    theirs, ours = Collected(), Collected()
    keys = ("moment", "price", "text", "parts")
    columns = ("cast(moment as long)", "price", "hex(text)", "hex(parts.a)", "n")
    for part in (1, 3):
        write_events(tmp_path / "input", [[("FF", 1), ("61", 2)], [("FF", 3), ("FE", 4)], [("61", 100)]][:part])
        rows = events(spark, tmp_path / "input").selectExpr(
            "at",
            "timestamp_seconds(253402318799) as moment",
            "1.50 as price",
            "cast(unhex(k) as string) as text",
            "struct(cast(unhex(k) as string) as a, date'+10000-01-01' as b) as parts",
        )
        native = rows.groupBy(*keys, F.window("at", "10 seconds")).agg(F.count("*").alias("n"))
        run_to_end(native.selectExpr(*columns).writeStream, tmp_path / "theirs", theirs)
        processor = Aggregate(Count(name="n"), windows=tumbling("at", 10 * SECOND))
        result = make_backend().transform_columns(rows.groupBy(*keys), processor, outputMode="Append")
        run_to_end(result.selectExpr(*columns).writeStream, tmp_path / "ours", ours)

    assert [row[2:] for row in ours.batches[2]] == [("61", "61", 1), ("FE", "FE", 1), ("FF", "FF", 2)]
    assert ours.batches[2] == theirs.batches[max(theirs.batches)]


def test_repetitions_are_dropped(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """One of the rows with the same key within a period passes, with all its columns."""
    write_events(tmp_path / "input", [[("a", 1), ("a", 2), ("b", 2)], [("a", 5), ("c", 6)], [("a", 11)]])
    output = Collected()
    grouped = events(spark, tmp_path / "input").groupBy("k")
    result = make_backend().transform_columns(grouped, Deduplicate("at", within=10 * SECOND), outputMode="Append")
    run_to_end(result.writeStream.outputMode("append"), tmp_path / "checkpoint", output)

    got = {batch: [(key, seconds(at)) for key, at in rows] for batch, rows in output.batches.items()}
    assert got == {0: [("a", 1), ("b", 2)], 1: [("c", 6)], 2: [("a", 11)]}


def test_watermark_is_that_of_the_times(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Windows that no watermark ends are refused at once; after Deduplicate or a rename, the watermark is known."""
    (tmp_path / "input").mkdir()
    stream = read_input(spark, tmp_path / "input", "k string, at timestamp, came timestamp")
    backend = make_backend()
    windows = Aggregate(Count(name="n"), windows=tumbling("at", 10 * SECOND))
    with pytest.raises(InvalidInputError, match="no watermark: call withWatermark on 'at'"):
        backend.transform_columns(stream.groupBy("k"), windows, outputMode="Append")
    with pytest.raises(InvalidInputError, match="times in 'at', but the watermark is on 'came'"):
        backend.transform_columns(stream.withWatermark("came", "5 seconds").groupBy("k"), windows)

    renamed = stream.withWatermark("came", "5 seconds").select("k", F.col("came").alias("at"))
    once = backend.transform_columns(renamed.groupBy("k"), Deduplicate("at", within=10 * SECOND), outputMode="Append")
    backend.transform_columns(once.groupBy("k"), windows, outputMode="Append")
    assert [record for record in caplog.records if record.name.startswith("backend_client")] == []


def test_other_processor_is_refused(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I15: state with columns other than the stored ones is refused at the start, with the field's name."""
    write_input(tmp_path / "input", random_input(seed=7, batches=1, rows=10, keys=3))
    frame = read_input(spark, tmp_path / "input")
    run = make_backend().transform_columns(frame.groupBy("k"), TOTALS, name="totals").writeStream
    run_to_end(run, tmp_path / "checkpoint", Collected())

    other = Aggregate(Count(name="n"), Sum("v", name="total"))
    run = make_backend().transform_columns(frame.groupBy("k"), other, name="totals").writeStream
    with pytest.raises(InvalidInputError, match=r"s\.0"):
        run_to_end(run, tmp_path / "checkpoint", Collected())
