"""Wrong input and mismatched parts: the error is clear, names the remedy, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count
from backend_client.service.job_session import JobSession, connect
from backend_client.spark.api.plan import StatefulDataFrame
from backend_client.spark.query import Query
from backend_client.spark.start import checks
from backend_client.spark.start.checks import StartOperators
from backend_client.spark.start.operator_tables import assign_tables
from dstl_service.cli import main
from storage.errors import ConflictError, DstlError, InvalidInputError
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    random_input,
    read_input,
    run_to_end,
    write_input,
)

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
FILES = random_input(seed=20, batches=3, rows=40, keys=8)


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Return two batches of rows."""
    write_input(tmp_path / "in", FILES[:2])
    return read_input(spark, tmp_path / "in")


def totals(backend: ChangelogStateBackend, stream: DataFrame, key: str = "k", **options: Any) -> StatefulDataFrame:
    return backend.transform_with_state(stream.groupBy(key), Totals(), OUTPUT, "Update", "None", **options)


def test_newer_query_fences_the_older(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """I4: a query whose job was taken over stops with an error that says so, and writes no checkpoint."""
    backend = make_backend()

    def function(batch: DataFrame, batch_id: int) -> None:
        batch.count()
        if batch_id == 1:
            JobSession.open(connect(backend.settings), backend.settings)

    with pytest.raises(StreamingQueryException, match="was taken over by epoch 2"):
        run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", function)

    assert [progress.batch_id for progress in backend.recent_progress] == [0]


@pytest.mark.parametrize("wrong", ["another Spark checkpoint", "another operator"])
def test_refused_start_leaves_the_running_query_alone(
    make_backend: Backends, stream: DataFrame, tmp_path: Path, wrong: str
) -> None:
    """I4: a query started by mistake under the name of a running one is refused, and the running one is not fenced."""
    backend, collected = make_backend(), Collected()
    refused: list[int] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        collected(batch, batch_id)
        if batch_id == 1:
            operator = {"name": "renamed"} if wrong == "another operator" else {}
            location = tmp_path / ("chk" if operator else "other")
            with pytest.raises(InvalidInputError, match=r"is new|does not have"):
                run_to_end(totals(make_backend(), stream, **operator).writeStream, location, print)
            refused.append(batch_id)

    run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", function)

    assert refused == [1]
    assert collected.batches == expected_output(FILES[:2])


def test_new_spark_checkpoint_on_old_state(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """State without its Spark checkpoint is not mixed with a stream that starts from the beginning."""
    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", Collected())

    with pytest.raises(InvalidInputError, match=r"state up to batch 1, but the Spark checkpoint .* is new"):
        run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "other", Collected())


@pytest.mark.parametrize("batches", ["one", "two", "many"])
def test_old_spark_checkpoint_on_new_state(
    make_backend: Backends, stream: DataFrame, tmp_path: Path, batches: str
) -> None:
    """A Spark checkpoint without its state is refused before a batch runs, whatever entries it still has."""
    run_to_end(totals(make_backend("one"), stream).writeStream, tmp_path / "chk", Collected())
    for folder in (tmp_path / "chk/offsets", tmp_path / "chk/commits"):
        if batches == "one":
            (folder / "1").unlink()
        if batches == "many":  # Spark deletes all but the last hundred
            (folder / "0").unlink()
            (folder / "1").rename(folder / "200")

    with pytest.raises(InvalidInputError, match="already has batches, but job 'two' has no state"):
        run_to_end(totals(make_backend("two"), stream).writeStream, tmp_path / "chk", Collected())


def test_driver_that_died_in_its_first_write_starts_again(
    make_backend: Backends, stream: DataFrame, tmp_path: Path
) -> None:
    """An incomplete first offsets entry does not prevent the query from starting."""
    (tmp_path / "chk/offsets").mkdir(parents=True)
    (tmp_path / "chk/offsets/.0.0b57d2f1-4f6e-4c8e-9c55-0d8a3d6a0f11.tmp").write_text("v1\n{")
    collected = Collected()

    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", collected)

    assert collected.batches == expected_output(FILES[:2])


def test_spark_checkpoint_of_other_query(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """The Spark checkpoint of another query is refused by its query id."""
    for job in ("one", "two"):
        run_to_end(totals(make_backend(job), stream).writeStream, tmp_path / job, Collected())

    with pytest.raises(InvalidInputError, match=r"belongs to query .*, the state of job 'one' to query"):
        run_to_end(totals(make_backend("one"), stream).writeStream, tmp_path / "two", Collected())


@pytest.mark.parametrize("found", ["at the start", "in the batch"])
def test_spark_checkpoint_one_batch_behind(
    make_backend: Backends, stream: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """
    A batch that Spark plans again with more rows is not the state's batch: once set back, the job continues.

    The source's own offsets are equal, because the folder's files are counted in the Spark checkpoint itself.
    """
    location, collected = tmp_path / "chk", Collected()
    run_to_end(totals(make_backend(), stream).writeStream, location, collected)
    for folder in ("offsets", "commits", "sources/0"):
        for path in (location / folder).glob("*1*"):
            path.unlink()
    write_input(tmp_path / "in", [FILES[0], FILES[1] + FILES[2]])
    if found == "in the batch":  # lost after the check
        monkeypatch.setattr("backend_client.spark.driver.driver.check_start", _unchecked)

    refusal = StreamingQueryException if found == "in the batch" else ConflictError
    with pytest.raises(refusal, match=r"dstl rewind .* --checkpoint 0 --write job"):
        run_to_end(totals(make_backend(), stream).writeStream, location, Collected())
    monkeypatch.undo()
    storage = make_backend().settings.storage
    assert main(["rewind", "--storage", storage, "--checkpoint", "0", "--write", "job"]) == 0
    run_to_end(totals(make_backend(), stream).writeStream, location, collected)

    assert collected.batches == expected_output([FILES[0], FILES[1] + FILES[2]])


def _unchecked(query: Query, *arguments: Any) -> StartOperators:
    """Return a query's operators without the check of the Spark checkpoint."""
    latest, max_parallelism = arguments[1:]
    names = [operator.name for operator in query.operators]
    tables = assign_tables(names, latest.operators if latest else None, query.settings)
    return StartOperators(checks._operator_infos(query, tables, max_parallelism))


def test_spark_checkpoint_set_back(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """A Spark checkpoint that is older than the state is refused with the remedy."""
    writer = totals(make_backend(), stream).writeStream
    run_to_end(writer, tmp_path / "chk", Collected())
    for folder in ("offsets", "commits"):
        for path in (tmp_path / "chk" / folder).iterdir():
            path.unlink()

    with pytest.raises(ConflictError, match=r"contains batch 1, but the Spark checkpoint .* has no batch"):
        run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", Collected())


def test_lost_newest_checkpoint_is_not_fenced_but_found_again(
    make_backend: Backends, stream: DataFrame, tmp_path: Path
) -> None:
    """I10: if Spark has committed more than the state has, no start fences the lost checkpoint; its note has it."""
    location, collected = tmp_path / "chk", Collected()
    run_to_end(totals(make_backend(), stream).writeStream, location, collected)
    storage = make_backend().settings.storage
    newest = max(Path(storage.removeprefix("file://")).glob("job/checkpoints/*.json"))
    newest.unlink()

    with pytest.raises(ConflictError, match=r"committed batch 1 .* ends with checkpoint 0.* --up-to 1 --write job"):
        run_to_end(totals(make_backend(), stream).writeStream, location, Collected())
    assert main(["fsck", "--storage", storage, "--rebuild", "--up-to", "1", "--write", "job"]) == 0
    assert newest.exists()
    write_input(tmp_path / "in", FILES)
    run_to_end(totals(make_backend(), stream).writeStream, location, collected)

    assert collected.batches == expected_output(FILES)


def test_changed_key_columns_are_refused(
    spark: SparkSession, make_backend: Backends, stream: DataFrame, tmp_path: Path
) -> None:
    """For another key column, or the same with another type, the error names the column."""
    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", Collected())

    with pytest.raises(InvalidInputError, match="key of operator 'Totals' was stored with field 'k' where 'v' is now"):
        run_to_end(totals(make_backend(), stream, key="v").writeStream, tmp_path / "chk", Collected())
    typed = stream.withColumn("k", F.col("k").cast("int"))
    with pytest.raises(InvalidInputError, match="field 'k' as string, now it is int"):
        run_to_end(totals(make_backend(), typed).writeStream, tmp_path / "chk", Collected())


def test_missing_operator_is_refused(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """A query that lacks an operator with stored state is refused; the state is not silently lost."""
    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", Collected())

    with pytest.raises(InvalidInputError, match=r"state of the operator\(s\) Totals, which this query does not have"):
        run_to_end(totals(make_backend(), stream, name="renamed").writeStream, tmp_path / "chk", Collected())


def test_storage_that_cannot_be_written(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """If the storage is not writable, the start fails, before any batch runs."""
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")

    with pytest.raises(DstlError, match="store"):
        run_to_end(totals(make_backend(storage=f"file://{blocked}/store"), stream).writeStream, tmp_path / "chk", print)

    assert not (tmp_path / "chk" / "offsets").exists()


def test_function_that_ends_its_thread_ends_the_query(
    make_backend: Backends, stream: DataFrame, tmp_path: Path
) -> None:
    """Py4J gives Spark no answer for `SystemExit`: the query would wait for ever. Its next start has the batch."""

    def function(batch: DataFrame, batch_id: int) -> None:
        sys.exit(3)

    writer = totals(make_backend(), stream).writeStream
    query = writer.option("checkpointLocation", str(tmp_path / "chk")).foreachBatch(function).start()
    with pytest.raises(StreamingQueryException, match="the batch was ended by SystemExit: 3"):
        query.awaitTermination(120)
    again = Collected()
    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", again)
    assert again.batches == expected_output(FILES[:2])


def test_missing_checkpoint_location(make_backend: Backends, stream: DataFrame) -> None:
    """A query without checkpointLocation is refused with the reason."""
    with pytest.raises(InvalidInputError, match="checkpointLocation is required"):
        totals(make_backend(), stream).writeStream.foreachBatch(print).start()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeMode": "Eventtime "}, "timeMode must be 'None', 'ProcessingTime' or 'EventTime'"),
        ({"outputMode": "Complete"}, "outputMode must be 'Update' or 'Append'"),
        ({"eventTimeColumnName": "ts"}, "eventTimeColumnName 'ts' is not a column of the output; it has k, n, s"),
        ({"name": "a/b"}, "a/b"),
        ({"parallelism": 1000}, "max_parallelism"),
        ({"parallelism": 2.5}, "whole number"),
        ({"parallelism": 0}, "whole number"),
    ],
)
def test_impossible_argument_is_named(
    make_backend: Backends, stream: DataFrame, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    """An unsupported argument is refused with its name."""
    options = {"outputMode": "Update", "timeMode": "None", **arguments}

    with pytest.raises(InvalidInputError, match=message):
        result = make_backend().transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, **options)
        run_to_end(result.writeStream, tmp_path / "chk", Collected())


def test_unknown_option_has_a_hint(tmp_path: Path) -> None:
    """A misspelt option is refused with the nearest valid one."""
    with pytest.raises(InvalidInputError, match="did you mean 'parallelism'"):
        ChangelogStateBackend(f"file://{tmp_path}", job="job", paralelism=3)


def test_unknown_column_fails_where_written(make_backend: Backends, stream: DataFrame) -> None:
    """A wrong column name on a stateful result is an error at once, as on a DataFrame; so is an aggregation."""
    result = totals(make_backend(), stream)

    with pytest.raises(Exception, match="UNRESOLVED_COLUMN"):
        result.select("nothing")
    with pytest.raises(AttributeError, match="use a stateless operation"):
        result.orderBy("k")
    with pytest.raises(InvalidInputError, match="would be a stateful operation"):
        result.join(stream, "k")
    assert (result.columns, result.isStreaming) == (["k", "n", "s"], True)


@pytest.mark.parametrize(
    "key", [lambda: F.col("v") + 1, lambda: F.lower("k").alias("k"), lambda: F.lit(1)], ids=["sum", "alias", "literal"]
)
def test_key_that_is_not_a_column_is_refused(make_backend: Backends, stream: DataFrame, key: Any) -> None:
    """Grouping by an expression is refused with the remedy, even if the expression has a column's name."""
    with pytest.raises(InvalidInputError, match=r"stateful operator takes columns.*withColumn first"):
        make_backend().transform_with_state(stream.groupBy(key()), Totals(), OUTPUT, "Update", "None")


def test_key_is_found_as_spark_finds_columns(spark: SparkSession, make_backend: Backends, stream: DataFrame) -> None:
    """Column names match in any case, unless the session is case-sensitive."""
    result = totals(make_backend(), stream, key="K")
    assert result.statefulQuery.operators[0].key_columns == ("k",)

    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(InvalidInputError, match="'K' is none of k, v"):
            totals(make_backend(), stream, key="K")
    finally:
        spark.conf.unset("spark.sql.caseSensitive")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda result, _: result.select(F.sum("n")), "aggregate function"),
        (lambda result, _: result.filter("n > 1").selectExpr("count(*) as c"), "aggregate function"),
        (lambda result, _: result.withColumn("r", F.row_number().over(Window.orderBy("n"))), "window function"),
        (lambda result, _: result.withColumn("r", -F.monotonically_increasing_id()), "restart in every batch"),
        (lambda result, static: result.join(static, "k", "right"), "outer join"),
        (lambda result, static: result.join(static, "k", "full"), "outer join"),
    ],
    ids=["sum", "count", "window", "number", "right", "full"],
)
def test_step_over_many_rows_is_refused(
    spark: SparkSession, make_backend: Backends, stream: DataFrame, step: Any, message: str
) -> None:
    """An operation over many rows, which would see only one batch at a time, is refused where it is written."""
    static = spark.createDataFrame([("a", 1)], "k string, x int").groupBy("k").agg(F.max("x").alias("x"))
    result = totals(make_backend(), stream)

    with pytest.raises(InvalidInputError, match=message):
        step(result, static)
    assert result.join(static, "k", "left").select("k", F.abs("x").alias("y")).columns == ["k", "y"]


def test_name_of_a_running_query_is_refused(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """I4: running a cell twice does not affect the query that it started the first time."""
    refused: list[int] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        batch.count()
        with pytest.raises(InvalidInputError, match="'named' is already active in this session"):
            run_to_end(totals(make_backend(), stream).writeStream.queryName("named"), tmp_path / "chk", print)
        refused.append(batch_id)

    run_to_end(totals(make_backend(), stream).writeStream.queryName("named"), tmp_path / "chk", function)

    assert refused == [0, 1]


def test_sidecar_outlives_a_long_batch(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """A function that takes longer than the sidecar's idle time finds its batch's sets there."""
    backend = make_backend(sidecar_idle_exit_s=3)
    outlived: list[bool] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        batch.count()
        if batch_id:
            return
        pid, until = int(Path(backend.auto_started_sidecar.pid_path).read_text()), time.monotonic() + 8
        while psutil.pid_exists(pid) and time.monotonic() < until:
            time.sleep(0.1)
        outlived.append(psutil.pid_exists(pid))

    run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", function)

    assert outlived == [True]
    assert [progress.tries for progress in backend.recent_progress] == [1, 1]


def test_failing_listener_fails_no_batch(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """An error in a progress listener is logged: this batch and the following ones succeed."""
    heard: list[int] = []

    def listen(progress: Any) -> None:
        heard.append(progress.batch_id)
        raise BrokenPipeError("the terminal is gone")

    backend, collected = make_backend(on_progress=listen), Collected()
    run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", collected)

    assert heard == [0, 1]
    assert collected.batches == expected_output(FILES[:2])


class Failing(Totals):
    """Fails while a file exists."""

    def __init__(self, path: str, yields_wrong: bool = False) -> None:
        super().__init__()
        self.path = path
        self.yields_wrong = yields_wrong

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        if os.path.exists(self.path):
            if self.yields_wrong:
                yield Row(k=key[0], n="many", s=1.0)
                return
            self.totals.update(("many", 1.0))
        yield from super().handleInputRows(key, rows, timerValues)


@pytest.mark.parametrize(("yields_wrong", "message"), [(False, r"totals\.n is of type long"), (True, "column 'n'")])
def test_failed_batch_loses_nothing(
    make_backend: Backends, stream: DataFrame, tmp_path: Path, yields_wrong: bool, message: str
) -> None:
    """I1: a value that does not fit fails the query with the field's name; once fixed, the query resumes."""
    broken, collected = tmp_path / "broken", Collected()
    broken.touch()

    def start() -> None:
        result = make_backend().transform_with_state(
            stream.groupBy("k"), Failing(str(broken), yields_wrong), OUTPUT, "Update", "None"
        )
        run_to_end(result.writeStream, tmp_path / "chk", collected)

    with pytest.raises(StreamingQueryException, match=message) as raised:
        start()
    broken.unlink()
    start()

    said = str(raised.value).partition("operator 'Failing' failed: ")[2]
    assert re.search(message, said.partition("\n")[0]), "the first line says what happened"
    assert str(raised.value).count("in handleInputRows") <= 1, "the trace is there once"
    assert collected.batches == expected_output(FILES[:2])


def test_failing_user_function_repeats_batch(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """I1: a user's function that raises stops the query; the batch is executed again with the earlier state."""
    collected, fail = Collected(), [True]

    def function(batch: DataFrame, batch_id: int) -> None:
        collected(batch, batch_id)
        if batch_id == 1 and fail.pop():
            fail.append(False)
            raise RuntimeError("the sink is away")

    with pytest.raises(StreamingQueryException, match="the sink is away"):
        run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", function)
    run_to_end(totals(make_backend(), stream).writeStream, tmp_path / "chk", collected)

    assert collected.batches == expected_output(FILES[:2])


def test_deleted_state_is_noticed(make_backend: Backends, stream: DataFrame, tmp_path: Path) -> None:
    """I10: segment objects that were deleted manually are reported by name when a table needs them."""
    backend = make_backend()
    run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", Collected())
    write_input(tmp_path / "in", FILES)
    shutil.rmtree(tmp_path / "store" / "job" / "segments")
    shutil.rmtree(Path(backend.settings.local_dir) / "tables")
    pid = int(Path(backend.auto_started_sidecar.pid_path).read_text())
    os.kill(pid, 9)

    with pytest.raises(StreamingQueryException, match=r"segments/.*\.seg"):
        run_to_end(totals(backend, stream).writeStream, tmp_path / "chk", Collected())


@pytest.mark.parametrize("given", ["Update", "a bogus", "junk junk junk"])
def test_text_that_is_no_schema_is_told(make_backend: Callable[..., Any], spark: SparkSession, given: str) -> None:
    """An output mode in the place of the schema was an error of Spark's parser."""
    grouped = spark.readStream.format("rate").load().groupBy("value")
    with pytest.raises(InvalidInputError, match=rf"{given!r} is not a schema \(\w+\); write it as 'name type"):
        make_backend().transform_columns(grouped, Aggregate(Count()), given)
