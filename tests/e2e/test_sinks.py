"""Spark's sinks after a stateful result: what arrives over restarts and repeated batches."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.sinks.parquet import ParquetSink
from backend_client.spark.api.plan import StatefulDataFrame
from dstl_service.cli import main
from storage.errors import ConflictError, InvalidInputError
from tests.e2e.support import OUTPUT, Collected, Totals, expected_output, random_input, read_input, write_input

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
FILES = random_input(seed=50, batches=3, rows=40, keys=8)
FILES_SINK = ParquetSink("file:///x")


def totals(backend: ChangelogStateBackend, stream: DataFrame) -> StatefulDataFrame:
    return backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")


def run(writer: Any, location: Path) -> Any:
    query = writer.option("checkpointLocation", str(location)).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def rows_of(frame: DataFrame) -> list[Any]:
    return sorted((tuple(row) for row in frame.select("k", "n", "s").collect()), key=repr)


def expected(upto: int = 3) -> list[Any]:
    return sorted((row for rows in expected_output(FILES[:upto]).values() for row in rows), key=repr)


def test_file_sinks_write_once(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, lose_each_checkpoint_once: set[int]
) -> None:
    """I14: each row is in the files once, though every batch is executed twice and the query is restarted."""
    for upto in (2, 3):
        write_input(tmp_path / "in", FILES[:upto])
        backend = make_backend()
        result = totals(backend, read_input(spark, tmp_path / "in")).withColumn("part", F.col("n") % 2)
        run(result.writeStream.format("parquet").partitionBy("part").option("path", tmp_path / "out"), tmp_path / "chk")
        assert {progress.tries for progress in backend.recent_progress} == {2}

    assert lose_each_checkpoint_once == {0, 1, 2}
    read = spark.read.schema(f"{OUTPUT}, part long").parquet(str(tmp_path / "out"))
    assert rows_of(read) == expected()
    assert {path.name for path in (tmp_path / "out").glob("part=*")} <= {"part=0", "part=1"}
    # Spark treats the folder as a streaming sink's: only files in its log count.
    assert {path.name for path in (tmp_path / "out" / "_spark_metadata").glob("[0-9]*")} == {"0", "1", "2"}


@pytest.mark.parametrize("source", ["csv", "json", "orc"])
def test_other_file_formats(spark: SparkSession, make_backend: Backends, tmp_path: Path, source: str) -> None:
    """The other file formats work the same way, with their options."""
    write_input(tmp_path / "in", FILES[:1])
    writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream.format(source)

    run(
        writer.option("path", str(tmp_path / "out")).option("compression", "zlib" if source == "orc" else "gzip"),
        tmp_path / "chk",
    )

    files = [path.name for path in (tmp_path / "out").glob("part-*")]
    assert files
    assert all(name.endswith((".zlib.orc", ".csv.gz", ".json.gz")) for name in files)
    assert rows_of(spark.read.schema(OUTPUT).format(source).load(str(tmp_path / "out"))) == expected(1)


def test_file_sink_after_a_crash_between_checkpoint_and_commit(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """I3: a batch that Spark executes again because only its own commit is missing is in the files once."""
    for upto in (2, 3):
        write_input(tmp_path / "in", FILES[:upto])
        writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream
        run(writer.option("path", str(tmp_path / "out")), tmp_path / "chk")  # parquet is Spark's default
        if upto == 2:
            (tmp_path / "chk" / "commits" / "1").unlink()
            (tmp_path / "chk" / "commits" / ".1.crc").unlink()

    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == expected()


def test_file_sink_has_the_output_after_rewinds(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """
    Ids come again after a rewind, and Spark's sink leaves out those that it knows: it must get greater ones.

    Later a batch that was planned and not written is given up, too; Spark's log must have no gap when it is compacted,
    here with every second batch.
    """
    chk = tmp_path / "chk"

    def run_upto(upto: int) -> None:
        write_input(tmp_path / "in", FILES[:upto])
        writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream
        run(writer.option("path", str(tmp_path / "out")), chk)

    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", "2")
    try:
        run_upto(2)
        for upto, planned in ((2, False), (3, True), (3, True)):
            if planned:
                newest = max(int(path.name) for path in (chk / "offsets").glob("[0-9]*"))
                (chk / "offsets" / str(newest + 1)).write_text((chk / "offsets" / str(newest)).read_text())
            storage = f"file://{tmp_path / 'store'}"
            assert main(["rewind", "--storage", storage, "--checkpoint", "0", "--write", "job"]) == 0
            run_upto(upto)
    finally:
        spark.conf.unset("spark.sql.streaming.fileSink.log.compactInterval")

    again = [expected_output([FILES[0], [row for file in FILES[1:upto] for row in file]])[1] for upto in (2, 3, 3)]
    rows = [*expected(2), *(row for batch in again for row in batch)]
    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == sorted(rows, key=repr)


def test_file_sink_has_the_output_after_an_older_spark_checkpoint(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """
    An older copy of the Spark checkpoint knows fewer batches than the sink, which would leave later ones out.

    The error of the start says to which checkpoint the state is rewound.
    """
    chk = tmp_path / "chk"

    def run_upto(upto: int) -> None:
        write_input(tmp_path / "in", FILES[:upto])
        writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream
        run(writer.option("path", str(tmp_path / "out")), chk)

    run_upto(1)
    shutil.copytree(chk, tmp_path / "copy")
    for upto in (2, 3):
        run_upto(upto)
    shutil.rmtree(chk)
    shutil.copytree(tmp_path / "copy", chk)
    with pytest.raises(ConflictError, match=r"rewind the state as well: dstl rewind .* --checkpoint 0 --write job"):
        run_upto(3)
    assert main(["rewind", "--storage", f"file://{tmp_path / 'store'}", "--checkpoint", "0", "--write", "job"]) == 0
    run_upto(3)

    again = [row for batch_id in (1, 2) for row in expected_output(FILES)[batch_id]]  # the source has forgotten them
    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == sorted([*expected(), *again], key=repr)


def test_file_sink_of_a_query_that_has_run_without_it(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """
    A folder that comes later has all batches since, and Spark's log of its files is merged as usual.

    It merges entries at fixed ids, here every third, and needs all since the last one that was merged.
    """
    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", "3")
    files = [[(f"k{number}", 1.0)] for number in range(7)]
    try:
        for upto, folder in ((4, None), (5, "out"), (7, "out")):
            write_input(tmp_path / "in", files[:upto])
            writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream
            if folder is None:
                run(writer.foreachBatch(Collected()), tmp_path / "chk")
            else:
                run(writer.option("path", str(tmp_path / folder)), tmp_path / "chk")
                read = spark.read.parquet(str(tmp_path / folder))
                assert rows_of(read) == [(f"k{number}", 1, 1.0) for number in range(4, upto)]
    finally:
        spark.conf.unset("spark.sql.streaming.fileSink.log.compactInterval")
    entries = {path.name for path in (tmp_path / "out" / "_spark_metadata").glob("[0-9]*")}
    assert entries >= {"2.compact", "3", "4", "5.compact", "6"}


@pytest.mark.parametrize(("kind", "others"), [("folder", 1), ("table", 2)])
def test_folder_of_another_query_is_refused(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, kind: str, others: int
) -> None:
    """Spark would leave out all batches up to the folder's newest one, unnoticed; one is enough for that."""

    def started(job: str, files: int) -> Any:
        write_input(tmp_path / job, FILES[:files])
        writer = totals(make_backend(job), read_input(spark, tmp_path / job)).writeStream
        writer = writer.option("path", str(tmp_path / "out")).option("checkpointLocation", str(tmp_path / f"chk-{job}"))
        writer = writer.trigger(availableNow=True)
        return writer.start() if kind == "folder" else writer.toTable(f"of_{others}_batches")

    started("first", others).awaitTermination()
    with pytest.raises(ConflictError, match=f"has batches up to {others - 1} of another query"):
        started("second", 3)
    started("first", 2).awaitTermination()
    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == expected(2)
    spark.sql(f"drop table if exists of_{others}_batches")


def test_folder_of_another_running_query_is_an_error(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """Both find an empty folder at their start; Spark would leave out the later one of two batches of an id."""
    queries = {}
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        writer = totals(make_backend(job), read_input(spark, tmp_path / job)).writeStream
        queries[job] = writer.start(str(tmp_path / "out"), checkpointLocation=str(tmp_path / f"chk-{job}"))
    try:
        write_input(tmp_path / "first", FILES[:1])
        queries["first"].processAllAvailable()
        write_input(tmp_path / "second", FILES[1:2])
        with pytest.raises(StreamingQueryException, match="got a batch 0 while this query computed its own"):
            queries["second"].processAllAvailable()
    finally:
        for query in queries.values():
            query.stop()
    assert rows_of(spark.read.parquet(str(tmp_path / "out"))) == expected(1)


def test_tables_are_created_and_appended_to(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, lose_each_checkpoint_once: set[int]
) -> None:
    """
    I14: toTable creates a partitioned table and appends to it after a restart, each batch once.

    A session that has read the table sees what was added since, as on Spark.
    """
    table = "totals_" + re.sub(r"\W", "_", tmp_path.name)
    results: list[StatefulDataFrame] = []
    for upto in (1, 3):
        write_input(tmp_path / "in", FILES[:upto])
        results.append(totals(make_backend(), read_input(spark, tmp_path / "in")).withColumn("part", F.col("n") % 2))
        writer = results[-1].writeStream.trigger(availableNow=True)
        writer.toTable(table, partitionBy="part", checkpointLocation=str(tmp_path / "chk")).awaitTermination()
        assert rows_of(spark.table(table)) == expected(upto)

    result = results[-1]
    with pytest.raises(InvalidInputError, match=r"is partitioned by \(part\), not by \(k\)"):
        result.writeStream.toTable(table, partitionBy="k", checkpointLocation=str(tmp_path / "chk"))
    spark.sql(f"DROP TABLE {table}")
    spark.range(1).createOrReplaceTempView("a_view")
    with pytest.raises(InvalidInputError, match=r"use foreachBatch with batch.writeTo\('a_view'\)"):
        result.writeStream.toTable("a_view", checkpointLocation=str(tmp_path / "chk"))


@pytest.mark.parametrize("folder", ["my tables", "100%20 + 5%/Größe #1"])
def test_table_in_a_folder_of_any_name(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, folder: str
) -> None:
    """A table is written where it is read, even if its folder's name has other forms as a URI."""
    write_input(tmp_path / "in", FILES[:1])
    table = "odd_" + re.sub(r"\W", "_", tmp_path.name)
    options = {"path": str(tmp_path / folder / "t"), "checkpointLocation": str(tmp_path / folder / "chk")}
    writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream.trigger(availableNow=True)

    writer.toTable(table, **options).awaitTermination()

    assert rows_of(spark.table(table)) == expected(1)
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "store", folder.partition("/")[0]}
    spark.sql(f"DROP TABLE {table}")


def test_memory_sink_is_a_table(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, lose_each_checkpoint_once: set[int]
) -> None:
    """The rows of all batches can be queried by the query's name, each once; no case counts, as in Spark."""
    write_input(tmp_path / "in", FILES[:2])
    name = "memory_" + re.sub(r"\W", "_", tmp_path.name)
    writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream.outputMode("update")

    query = run(writer.format("Memory").queryName(name), tmp_path / "chk")

    assert (query.name, query.isActive) == (name, False)
    assert rows_of(spark.table(name)) == expected(2)


def test_name_and_location_may_be_options(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """As in Spark, an option may name the query, whose job it then also names, and no option's case counts."""
    write_input(tmp_path / "in", FILES[:1])
    name = "named_" + re.sub(r"\W", "_", tmp_path.name)
    backend = make_backend("job")
    with backend.install(spark):
        grouped = read_input(spark, tmp_path / "in").groupBy("k")
        result = grouped.transformWithState(Totals(), OUTPUT, "Update", "None")
        writer = result.writeStream.outputMode("update").format("memory").trigger(availableNow=True)
        writer.option("checkpointLocation", "a").option("CheckpointLocation", "b")  # what is set last counts
        query = writer.options(QueryName=name, checkpointLocation=str(tmp_path / "chk")).start()
        query.awaitTermination()

    assert query.name == name
    assert (tmp_path / "chk").is_dir()
    assert rows_of(spark.table(name)) == expected(1)
    assert [progress.job for progress in backend.recent_progress[:1]] == [f"job.{name}"]


def test_console_sink_prints_as_spark(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console sink prints each batch below Spark's heading, with its options; the session may set the location."""
    write_input(tmp_path / "in", [[("a", 1.0)], [("b", 2.0)]])
    spark.conf.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "chk"))
    try:
        writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream.format("console")
        query = writer.queryName("shown").option("numRows", 5).trigger(once=True).start()
        query.awaitTermination()
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")

    printed = capsys.readouterr().out
    assert (
        "-------------------------------------------\nBatch: 0\n-------------------------------------------\n"
        in printed
    )
    assert "|  a|  1|1.0|" in printed
    assert (tmp_path / "chk" / "shown" / "offsets" / "0").exists()


class Opens:
    """Spark's ForeachWriter: refuses one partition, and records its calls."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def tell(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def open(self, partition_id: int, epoch_id: int) -> bool:
        self.tell(f"open {epoch_id}")
        return True

    def process(self, row: Any) -> None:
        self.tell(f"row {row.k}")
        if row.k == "bad":
            raise ValueError("a bad row")

    def close(self, error: Exception | None) -> None:
        self.tell(f"close {error}")


def test_foreach_writer_is_opened_and_closed(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """A writer object is opened with the batch id and closed with the error that its process raised."""
    write_input(tmp_path / "in", [[("good", 1.0)], [("bad", 2.0)]])
    writer = totals(make_backend(parallelism=1), read_input(spark, tmp_path / "in")).writeStream

    with pytest.raises(StreamingQueryException, match="a bad row"):
        run(writer.foreach(Opens(tmp_path / "told")), tmp_path / "chk")

    told = (tmp_path / "told").read_text().splitlines()
    assert told[:3] == ["open 0", "row good", "close None"]
    assert {"open 1", "row bad", "close a bad row"} <= set(told[3:])


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda writer: writer.format("parquet"), "needs a path"),
        (lambda writer: writer.format("parquet").outputMode("update").option("path", "/x"), "only appends"),
        (
            lambda writer: writer.partitionBy("nothing").option("path", "/x"),
            "partitionBy names unknown columns nothing",
        ),
        (lambda writer: writer.partitionBy("k", "n", "s").option("path", "/x"), "names all columns"),
        (lambda writer: writer.partitionBy("k").format("console"), "does not support partitionBy"),
        (lambda writer: writer.format("memory"), r"needs queryName"),
        (lambda writer: writer.format("kafka"), "does not find the format 'kafka': add its package"),
        (lambda writer: writer.format("nonsense"), "does not find the format 'nonsense'"),
        (lambda writer: writer.format("rate"), "has no streaming sink .* use foreachBatch"),
        (lambda writer: writer, "has no sink; name one"),
        (lambda writer: writer.trigger(continuous="1 second"), "state is checkpointed per batch"),
        (lambda writer: writer.clusterBy("k"), "use partitionBy"),
        (lambda writer: writer.foreach(3), "foreach takes a function of a row"),
        (lambda writer: writer.outputMode("complete"), "output mode 'complete' is not supported"),
        (lambda writer: writer.sink(FILES_SINK, name="a").sink(FILES_SINK, name="b"), "publishes to one"),
        (lambda writer: writer.sink(FILES_SINK).partitionBy("k"), "has no partitionBy"),
        (lambda writer: writer.sink(FILES_SINK).option("path", "/x").option("slots", 4), "has no option path, slots: "),
        (
            lambda writer: writer.format("console").option("gaurantee", "at-most-once"),
            "no option 'gaurantee'; it looks like 'guarantee'",
        ),
        (lambda writer: writer.sink(FILES_SINK).option("abandonOutputs", "x"), "looks like 'abandonOutput'"),
        (lambda writer: writer.trigger(realTime="1 second"), "state is checkpointed per batch"),
        (lambda writer: writer.foreachBatch(print).foreach(print), "has a function already"),
        (lambda writer: writer.foreachBatch(print).format("json"), "a function, and format besides"),
        (lambda writer: writer.foreach(print).option("path", "/x"), "a function, and a path besides"),
        (lambda writer: writer.foreachBatch(print).partitionBy("k"), "a function, and partitionBy besides"),
    ],
)
def test_impossible_sink_is_named(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, configure: Callable[[Any], Any], message: str
) -> None:
    """For a missing or unsupported part of a sink, the start fails with an error that names it, before the takeover."""
    write_input(tmp_path / "in", FILES[:1])
    writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream

    with pytest.raises(InvalidInputError, match=message):
        configure(writer).start(checkpointLocation=str(tmp_path / "chk"))

    assert not (tmp_path / "store").exists()


def test_other_output_beside_a_table_is_refused(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """A sink that publishes exactly once, or a function, would get nothing, without a word; nor does a first path."""
    write_input(tmp_path / "in", FILES[:1])
    options = {"checkpointLocation": str(tmp_path / "chk")}

    def writer() -> Any:
        return totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream

    with pytest.raises(InvalidInputError, match=r"has a sink\(…\) and another output, toTable"):
        writer().sink(FILES_SINK).toTable("beside_a_sink", **options)
    with pytest.raises(InvalidInputError, match=r"has a function and another output, toTable"):
        writer().foreachBatch(print).toTable("beside_a_function", **options)
    with pytest.raises(InvalidInputError, match=r"the path is given twice"):
        writer().option("Path", "/first").start(str(tmp_path / "out"), **options)

    assert not spark.catalog.tableExists("beside_a_sink")
    assert not (tmp_path / "store").exists()


def test_function_takes_the_place_of_a_format_before_it(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """As on Spark; the last call counts."""
    write_input(tmp_path / "in", FILES[:1])
    collected = Collected()
    writer = totals(make_backend(), read_input(spark, tmp_path / "in")).writeStream.format("json")

    run(writer.foreachBatch(collected), tmp_path / "chk")

    assert list(collected.batches) == [0]


def test_native_stateful_operator_before_ours(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, lose_each_checkpoint_once: set[int]
) -> None:
    """I14: with Spark's own dropDuplicates before the operator, repeated or skipped batches leave correct state."""
    files = [[("a", 1.0), ("b", 1.0), ("a", 1.0)], [("a", 1.0), ("c", 2.0)], [("c", 2.0), ("a", 3.0), ("b", 1.0)]]
    collected = Collected()
    for upto in (1, 2, 3):  # a start after a batch that Spark has committed, and one after a batch that it has not
        write_input(tmp_path / "in", files[:upto])
        stream = read_input(spark, tmp_path / "in").dropDuplicates(["k", "v"])
        writer = totals(make_backend(), stream).writeStream.foreachBatch(collected)
        run(writer, tmp_path / "chk")
        if upto == 2:
            (tmp_path / "chk" / "commits" / "1").unlink()
            (tmp_path / "chk" / "commits" / ".1.crc").unlink()

    assert collected.batches == {0: [("a", 1, 1.0), ("b", 1, 1.0)], 1: [("c", 1, 2.0)], 2: [("a", 2, 4.0)]}
