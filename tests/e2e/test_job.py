"""A job from start to end in one process: the user's program, its output, and the stored objects."""

from __future__ import annotations

import datetime as dt
import os
import re
import signal
import subprocess
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

from backend_client import ChangelogStateBackend
from backend_client.spark.api.plan import StatefulDataFrame
from storage.open import open_store
from tests.e2e.support import (
    INPUT,
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    expected_state,
    random_input,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
README = Path(__file__).parents[2] / "README.md"


def transform(backend: ChangelogStateBackend, stream: DataFrame, **options: Any) -> StatefulDataFrame:
    return backend.transform_with_state(
        stream.groupBy("k"),
        statefulProcessor=Totals(),
        outputStructType=OUTPUT,
        outputMode="Update",
        timeMode="None",
        **options,
    )


def test_restart_goes_on_from_the_checkpoint(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """
    I14: further runs with another parallelism continue with the state of the first.

    Every batch's output and the stored state are those of a plain computation, including null keys.
    """
    files = random_input(seed=2, batches=4, rows=300, keys=40)
    backend, collected = make_backend(), Collected()
    for upto, parallelism in ((2, 2), (3, 5), (4, 1)):
        write_input(tmp_path / "in", files[:upto])
        result = transform(make_backend(), read_input(spark, tmp_path / "in"), parallelism=parallelism)
        run_to_end(result.writeStream, tmp_path / "chk", collected)

    assert collected.batches == expected_output(files)
    assert stored_totals(backend.settings.storage, "job") == expected_state(files)


def test_empty_local_folder_restores_from_log(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """I16: a host without local tables rebuilds them from the log alone."""
    files = random_input(seed=3, batches=3, rows=200, keys=30)
    collected = Collected()
    write_input(tmp_path / "in", files[:2])
    backend = make_backend()
    run_to_end(transform(backend, read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", collected)
    write_input(tmp_path / "in", files)
    tables = Path(backend.settings.local_dir) / "tables"
    tables.rename(tables.with_name("lost"))

    run_to_end(transform(make_backend(), read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", collected)

    assert collected.batches == expected_output(files)


def objects_by_checkpoint(url: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for info in open_store(url).list("job/"):
        kind = info.key.split("/")[1]
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def test_checkpoint_writes_two_objects(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Eight partitions of one operator share one segment object per checkpoint, beside the manifest."""
    files = random_input(seed=5, batches=2, rows=400, keys=100)
    write_input(tmp_path / "in", files)
    backend = make_backend(parallelism=8)

    run_to_end(transform(backend, read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", Collected())

    counts = objects_by_checkpoint(backend.settings.storage)
    assert counts["segments"] == 2
    assert counts["checkpoints"] == 2 + 1  # and the fence of the run
    assert [progress.objects_written for progress in backend.recent_progress] == [2, 2]


def chain(backend: ChangelogStateBackend, stream: DataFrame) -> StatefulDataFrame:
    """Return totals per key, then totals per number of rows, with stateless steps before, between and after."""
    first = transform(backend, stream.filter("v >= 0"), name="first")
    between = first.withColumn("v", F.col("s")).filter("n > 0").select(F.col("n").cast("string").alias("k"), "v")
    second = backend.transform_with_state(
        between.groupBy("k"), Totals(), OUTPUT, "Update", "None", name="second", parallelism=3
    )
    result: StatefulDataFrame = second.withColumn("twice", second["n"] * 2).drop("s")
    return result


def test_two_operators_in_a_chain(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """I18: a chain computes the same as two plain computations in a row, with at most three objects per checkpoint."""
    files = random_input(seed=6, batches=2, rows=200, keys=30)
    write_input(tmp_path / "in", files)
    backend, collected = make_backend(), Collected()

    run_to_end(chain(backend, read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", collected)

    between = [[(str(n), s) for _, n, s in rows] for rows in expected_output(files).values()]
    expected = {i: sorted((k, n, n * 2) for k, n, _ in rows) for i, rows in expected_output(between).items()}
    assert collected.batches == expected
    assert max(progress.objects_written for progress in backend.recent_progress) <= 3


class Counting(Totals):
    """Totals that append a line to a file for every call."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("x\n")
        yield from super().handleInputRows(key, rows, timerValues)


def test_several_actions_compute_once(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """I18: a user's function with three actions sees the same rows each time, and the processor runs once per key."""
    files = random_input(seed=7, batches=2, rows=100, keys=20)
    write_input(tmp_path / "in", files)
    calls, seen = tmp_path / "calls", []
    result = make_backend().transform_with_state(
        read_input(spark, tmp_path / "in").groupBy("k"), Counting(str(calls)), OUTPUT, "Update", "None"
    )

    def function(batch: DataFrame, _: int) -> None:
        seen.append((batch.count(), batch.filter("n > 0").count(), len(batch.groupBy("k").count().collect())))

    run_to_end(result.writeStream, tmp_path / "chk", function)

    keys = [len({k for k, _ in rows}) for rows in files]
    assert seen == [(count, count, count) for count in keys]
    assert len(calls.read_text().splitlines()) == sum(keys)


class Everything(StatefulProcessor):
    """Stores one value of every type and reports what it reads back."""

    SCHEMA = (
        "a struct<x:int,y:string>, b array<int>, c map<string,int>, d decimal(10,2), e timestamp, f date, g binary, "
        "h timestamp_ntz, i float, j array<struct<q:int>>, k boolean, l string, m double, o long"
    )
    VALUE = (
        Row(x=1, y="z"),
        [1, None, 3],
        {"a": 1, "b": None},
        Decimal("1.50"),
        dt.datetime(2020, 1, 1, 12, 30, 0, 123456),
        dt.date(1969, 7, 20),
        b"\x00\xff",
        dt.datetime(1960, 1, 1, 13),
        0.1,
        [Row(q=1), None],
        True,
        None,
        float("inf"),
        -(1 << 62),
    )

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", self.SCHEMA)
        self.other = handle.getValueState("other", "v int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        found, existed = self.value.get(), self.value.exists()
        if self.other.get() is None:
            self.other.update((len(list(rows)),))
        else:
            self.other.clear()
        self.value.update(self.VALUE)
        yield Row(k=key[0], found=repr(found), existed=existed, other=repr(self.other.get()))

    def close(self) -> None:
        pass


def test_composite_values_come_back(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Values of every type are read back as by Spark's own value state, and clear removes one."""
    write_input(tmp_path / "in", [[("a", 1.0)], [("a", 2.0)], [("a", 3.0)]])
    collected = Collected()
    result = make_backend().transform_with_state(
        read_input(spark, tmp_path / "in").groupBy("k"),
        Everything(),
        "k string, found string, existed boolean, other string",
        "Update",
        "None",
    )

    run_to_end(result.writeStream, tmp_path / "chk", collected)

    value = Everything.VALUE
    as_float32 = (*value[:8], 0.10000000149011612, *value[9:])
    assert collected.batches == {
        0: [("a", "None", False, "(1,)")],
        1: [("a", repr(as_float32), True, "None")],
        2: [("a", repr(as_float32), True, "(1,)")],
    }


class KeyEcho(StatefulProcessor):
    """Yields its keys, and the number of calls."""

    def init(self, handle: Any) -> None:
        self.calls = handle.getValueState("calls", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        calls = (self.calls.get() or (0,))[0] + 1
        self.calls.update((calls,))
        yield Row(key=repr(key), calls=calls, rows=len(list(rows)))

    def close(self) -> None:
        pass


def test_keys_of_several_typed_columns(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Rows of one composite key, with nulls, minus zero and NaN, reach the processor in one call."""
    write_input(tmp_path / "in", [[("a", 0.0), ("a", -0.0), ("b", 1.0), (None, 1.0), (None, 1.0)]] * 2)
    stream = read_input(spark, tmp_path / "in").selectExpr(
        "struct(k, 1 as one) as s", "if(k = 'b', double('NaN'), v) as d", "date'2020-01-02' as t", "decimal(v) as m"
    )
    collected = Collected()
    result = make_backend().transform_with_state(
        stream.groupBy("s", "d", "t", "m"), KeyEcho(), "key string, calls int, rows int", "Update", "None"
    )

    run_to_end(result.writeStream, tmp_path / "chk", collected)

    assert [(calls, rows) for _, calls, rows in collected.batches[1]] == [(2, 2), (2, 1), (2, 2)]
    assert {key for key, _, _ in collected.batches[0]} == {key for key, _, _ in collected.batches[1]}


def test_sidecar_killed_between_batches(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """The next client restarts a dead sidecar, and the stream continues by itself."""
    files = random_input(seed=8, batches=3, rows=100, keys=20)
    write_input(tmp_path / "in", files)
    backend, collected, to_kill = make_backend(), Collected(), {0, 1}

    def function(batch: DataFrame, batch_id: int) -> None:
        collected(batch, batch_id)
        if batch_id in to_kill:
            to_kill.remove(batch_id)
            os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)

    run_to_end(transform(backend, read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", function)

    assert collected.batches == expected_output(files)
    assert stored_totals(backend.settings.storage, "job") == expected_state(files)


def test_batch_with_manifest_is_not_repeated(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """A batch whose checkpoint exists, but which Spark did not commit, is not computed again."""
    files = random_input(seed=9, batches=3, rows=50, keys=10)
    write_input(tmp_path / "in", files[:2])
    collected = Collected()
    run_to_end(transform(make_backend(), read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", collected)
    (tmp_path / "chk" / "commits" / "1").unlink()
    (tmp_path / "chk" / "commits" / ".1.crc").unlink()
    write_input(tmp_path / "in", files)
    again = Collected()

    run_to_end(transform(make_backend(), read_input(spark, tmp_path / "in")).writeStream, tmp_path / "chk", again)

    assert again.batches == {2: expected_output(files)[2]}


def test_readme_job_runs_as_printed(
    spark: SparkSession, tmp_path: Path, local_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job of the README runs as printed, except for its folders and its wait for the end."""
    readme = README.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?ChangelogStateBackend.*?)```", readme, re.DOTALL)
    make_input = re.search(r"`(mkdir -p /tmp/orders/in .*)`", readme)
    add_input = re.search(r"`echo '(.*)' > /tmp/orders/in/2\.json`", readme)
    printed = re.search(r"```\n(\+-.*?)```", readme, re.DOTALL)
    assert code is not None
    assert sum(1 for line in code[1].splitlines() if line) <= 15
    assert make_input is not None
    assert add_input is not None
    assert printed is not None
    wait = "query.awaitTermination()\n"
    assert code[1].endswith(wait)
    text = (
        code[1]
        .removesuffix(wait)
        .replace("/tmp/orders", str(tmp_path))
        .replace('job="orders"', f'job="orders", local_dir="{local_dir}"')
    )
    assert str(local_dir) in text
    subprocess.run(["/bin/sh", "-c", make_input[1].replace("/tmp/orders", str(tmp_path))], check=True)
    names: dict[str, Any] = {"__name__": "__main__"}

    exec(compile(text, "README.md", "exec"), names)
    query: StreamingQuery = names["query"]
    try:
        query.processAllAvailable()
        first = capsys.readouterr().out
        (tmp_path / "2.json").write_text(f"{add_input[1]}\n")
        (tmp_path / "2.json").rename(tmp_path / "in" / "2.json")  # so that no partial file is read
        query.processAllAvailable()
    finally:
        query.stop()

    assert printed[1] in first
    assert re.search(r"\| +ann\| +3\.5\|", capsys.readouterr().out)


def test_foreach_and_noop_sinks(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """The writer's foreach sees every row in the workers; the noop sink still creates checkpoints."""
    files = random_input(seed=10, batches=2, rows=50, keys=10)
    write_input(tmp_path / "in", files)
    out = tmp_path / "rows"

    def each(row: Row) -> None:
        with open(out, "a", encoding="utf-8") as file:
            file.write(f"{tuple(row)!r}\n")

    stream = read_input(spark, tmp_path / "in", INPUT)
    writer = transform(make_backend("a"), stream).writeStream.foreach(each)
    query = writer.option("checkpointLocation", str(tmp_path / "chk-a")).trigger(availableNow=True).start()
    query.awaitTermination()
    backend = make_backend("b")
    writer = transform(backend, stream).writeStream.format("noop").outputMode("update").queryName("quiet")
    quiet = writer.trigger(availableNow=True).start(checkpointLocation=str(tmp_path / "chk-b"))
    quiet.awaitTermination()

    expected = sorted(repr(row) for rows in expected_output(files).values() for row in rows)
    assert sorted(out.read_text().splitlines()) == expected
    assert len(backend.recent_progress) == 2
