"""Output that is published exactly once: what readers of the sink see after crashes at every step."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.service.job_session import JobSession
from backend_client.sinks.postgres import PostgresSink
from backend_client.sinks.protocol import Slot, SlotPublisher
from backend_client.spark.api.plan import StatefulDataFrame
from backend_client.spark.output import publisher
from dstl_service.cli import main
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.errors import InvalidInputError, LostChangesError, UnavailableError
from storage.open import open_store
from tests.e2e.support import OUTPUT, Totals, expected_output, random_input, read_input, write_input
from tests.support.kafka_reader import committed_values
from tests.waiting import wait_until
from tools.servers.kafka import KafkaBroker
from tools.servers.postgres import PostgresServer
from tools.servers.sqlite_sink import SqliteSink

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
FILES = random_input(seed=51, batches=4, rows=40, keys=8)


def totals(backend: ChangelogStateBackend, stream: DataFrame) -> StatefulDataFrame:
    return backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")


def rows_of_batches(batches: list[Any], begin: int = 0) -> list[Any]:
    output = expected_output(batches)
    return sorted((row for batch in range(begin, len(batches)) for row in output[batch]), key=repr)


def expected(upto: int) -> list[Any]:
    return rows_of_batches(FILES[:upto])


def published(sink: SqliteSink) -> list[Any]:
    return sorted(((row["k"], row["n"], row["s"]) for row in sink.records()), key=repr)


@pytest.fixture
def run(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs the query over the first input files, to its end."""

    def run_upto(sink: SqliteSink, upto: int, parallelism: int = 2, abandon: str = "", **options: Any) -> None:
        write_input(tmp_path / "in", FILES[:upto])
        result = totals(make_backend(parallelism=parallelism), read_input(spark, tmp_path / "in"))
        writer = result.writeStream.sink(sink, **{"slots": 2, "patience_s": 60, **options})
        writer = writer.option("abandonOutput", abandon)
        query = writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start()
        query.awaitTermination()

    return run_upto


def test_each_record_is_published_once(
    run: Callable[..., None], tmp_path: Path, lose_each_checkpoint_once: set[int]
) -> None:
    """I14: every batch is executed twice, and the query is restarted with other parallelism and slots."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    run(sink, 2)
    assert published(sink) == expected(2)
    run(sink, 3, parallelism=3, slots=3)
    run(sink, 4, parallelism=1, slots=1)
    assert published(sink) == expected(4)
    assert lose_each_checkpoint_once == {0, 1, 2, 3}


def test_what_a_crash_left_is_published_by_the_next_start(run: Callable[..., None], tmp_path: Path) -> None:
    """The crash between checkpoint and publish, which loses output where a sink commits on notification."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    run(sink, 1)
    down = tmp_path / "out.db.down"
    down.touch()
    with pytest.raises(UnavailableError, match=r"not published to sink 'output' after 1 s: .*is switched off"):
        run(sink, 3, patience_s=1)
    down.unlink()
    assert published(sink) == expected(1)
    run(sink, 3)
    assert published(sink) == expected(3)


def test_batches_wait_while_the_sink_is_away_and_go_on_when_it_is_back(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """No more than the allowed checkpoints are unpublished; the query needs no restart."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    down = tmp_path / "out.db.down"
    write_input(tmp_path / "in", FILES[:3])
    backend = make_backend()
    result = totals(backend, read_input(spark, tmp_path / "in"))
    down.touch()
    writer = result.writeStream.sink(sink, slots=2, backlog_checkpoints=2)
    query = writer.option("checkpointLocation", str(tmp_path / "chk")).start()
    try:
        wait_until(lambda: len(backend.recent_progress) == 2)
        assert query.isActive
        assert not sink.records()
        down.unlink()
        query.processAllAvailable()
        assert published(sink) == expected(3)
    finally:
        query.stop()


def test_a_query_can_be_stopped_while_its_sink_is_away(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, run: Callable[..., None]
) -> None:
    """`stop` says what is left, Spark's own handle does not wait for the sink; the next start publishes it."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    down = tmp_path / "out.db.down"
    write_input(tmp_path / "in", FILES[:2])
    backend = make_backend()
    result = totals(backend, read_input(spark, tmp_path / "in"))
    down.touch()
    writer = result.writeStream.sink(sink, slots=2, backlog_checkpoints=1, patience_s=1)
    query = writer.option("checkpointLocation", str(tmp_path / "chk")).start()
    wait_until(lambda: len(backend.recent_progress) == 1)
    handle = spark.streams.get(str(query.id))
    assert handle is not None
    handle.stop()
    with pytest.raises(UnavailableError, match="is kept in the log; fix the cause"):
        query.stop()
    assert not query.isActive
    down.unlink()
    run(sink, 2)
    assert published(sink) == expected(2)


def test_a_publish_without_an_end_leaves_its_cores_to_the_next_start(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer accepts and never answers, in each slot; the next query of the session gets their cores, and publishes."""
    path = str(tmp_path / "out.db")
    hangs = Path(f"{path}.hangs")

    class Hanging(SqliteSink):
        def open(self, slot: Slot) -> SlotPublisher:
            if Path(f"{self.path}.hangs").exists():
                time.sleep(3600)
            return SqliteSink.open(self, slot)

    monkeypatch.setattr(publisher, "_GRACE_S", 0.1)
    hangs.touch()
    with pytest.raises(UnavailableError, match="after 1 s: it takes long"):
        run(Hanging(path), 1, patience_s=1)
    hangs.unlink()
    run(Hanging(path), 2)
    assert published(Hanging(path)) == expected(2)


def test_a_rewind_publishes_new_output_and_nothing_old_twice(
    run: Callable[..., None], tmp_path: Path, make_backend: Backends
) -> None:
    """Ids come again after a rewind: their checkpoints are others, and so are their markers."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    run(sink, 2)
    before = rows_of_batches([FILES[0], FILES[1]])
    for upto in (3, 4):
        set_back(tmp_path, "--checkpoint", "0")
        run(sink, upto)  # all files after the first are one batch now
        joined = [row for file in FILES[1:upto] for row in file]
        before = sorted([*before, *rows_of_batches([FILES[0], joined], begin=1)], key=repr)
        assert published(sink) == before
    set_back(tmp_path, "--savepoint", first_savepoint(tmp_path))
    run(sink, 4)  # what the first branch had published is not published again, only the next batch's output
    new = rows_of_batches([FILES[0], FILES[1], [*FILES[2], *FILES[3]]], begin=2)
    assert published(sink) == sorted([*before, *new], key=repr)


def test_postgres_after_a_rewind_and_in_a_fork(
    spark: SparkSession,
    run: Callable[..., None],
    make_backend: Backends,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """New output is published and nothing old twice; the rewind tells what stays, and a fork publishes just its own."""
    with PostgresServer() as server, psycopg.connect(server.conninfo, autocommit=True) as connection:
        for table in ("parent", "fork"):
            connection.execute(f"create table {table} (k text, n bigint, s float8)")

        def rows(table: str) -> list[Any]:
            return sorted(connection.execute(f"select * from {table}").fetchall(), key=repr)

        sink = PostgresSink(server.conninfo, "parent")
        run(sink, 2)
        assert rows("parent") == expected(2)
        set_back(tmp_path, "--checkpoint", "0")
        assert "sink output may have published output of checkpoints 1 to 1, which stays" in capsys.readouterr().out
        run(sink, 3)  # all files after the first are one batch now
        batches = [FILES[0], [*FILES[1], *FILES[2]], FILES[3]]
        before = sorted([*expected(2), *rows_of_batches(batches[:2], begin=1)], key=repr)
        assert rows("parent") == before

        write_input(tmp_path / "in", FILES)
        fork = make_backend("fork", parallelism=2, fork_of="job", fork_location=str(tmp_path / "chk"))
        writer = totals(fork, read_input(spark, tmp_path / "in")).writeStream
        writer = writer.sink(PostgresSink(server.conninfo, "fork")).option("checkpointLocation", str(tmp_path / "fork"))
        writer.trigger(availableNow=True).start().awaitTermination()
        new = rows_of_batches(batches, begin=2)
        assert (rows("fork"), rows("parent")) == (new, before)
        run(sink, 4)
        assert (rows("fork"), rows("parent")) == (new, sorted([*before, *new], key=repr))


def test_slots_and_sinks_that_a_rewind_left_out_are_used_again(run: Callable[..., None], tmp_path: Path) -> None:
    """Their markers are of the branch before the rewind; nothing waits for ever, and nothing is published twice."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    run(sink, 2, slots=3)
    set_back(tmp_path, "--checkpoint", "0")
    run(sink, 2, name="other", slots=1, abandon="output")
    run(sink, 3, name="output", slots=2, abandon="other")
    run(sink, 4, name="output", slots=3, abandon="other")
    again = rows_of_batches(FILES[:2], begin=1)
    assert published(sink) == sorted([*expected(4), *again], key=repr)


def test_columns_may_have_any_names(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """With dots and backticks Spark does not find them in a function's input."""
    sink = SqliteSink(str(tmp_path / "out.db"))
    write_input(tmp_path / "in", FILES[:1])
    result = totals(make_backend(), read_input(spark, tmp_path / "in"))
    named = result.select(F.col("k").alias("k.k"), F.col("n").alias("`n"), F.struct("s").alias("k"))
    writer = named.writeStream.sink(sink).option("checkpointLocation", str(tmp_path / "chk"))
    writer.trigger(availableNow=True).start().awaitTermination()
    found = [(row["k.k"], row["`n"], row["k"]["s"]) for row in sink.records()]
    assert sorted(found, key=repr) == expected_output(FILES[:1])[0]


@pytest.mark.parametrize("moves", ["repartition", "subquery"])
def test_one_slot_keeps_the_order_of_rows_that_move(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, moves: str
) -> None:
    """
    After `repartition`, a key's partition says nothing of its slot: two slots would publish it in any order.

    Nor does it after a subquery, of which Spark makes a join.
    """
    sink = SqliteSink(str(tmp_path / "out.db"))
    write_input(tmp_path / "in", FILES[:2])
    result = totals(make_backend(), read_input(spark, tmp_path / "in"))
    if moves == "repartition":
        result = result.repartition(4)
    else:
        spark.range(8).selectExpr("concat('key-', id) as k").createOrReplaceTempView("known_keys")
        result = result.filter("k is null or k in (select k from known_keys)")
    query = result.writeStream.sink(sink, slots=2).option("checkpointLocation", str(tmp_path / "chk")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    with sqlite3.connect(sink.path) as connection:
        assert connection.execute("select distinct slot from records").fetchall() == [(0,)]
    assert published(sink) == expected(2)


def test_a_sink_is_not_left_with_unpublished_output_unnoticed(
    run: Callable[..., None], spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """A query without its former sink starts only if the user gives up what may be unpublished."""
    run(SqliteSink(str(tmp_path / "out.db")), 2)
    write_input(tmp_path / "in", FILES)

    def start(**options: str) -> Any:
        result = totals(make_backend(), read_input(spark, tmp_path / "in"))
        writer = result.writeStream.foreachBatch(lambda batch, _: None).options(**options)
        return writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start()

    with pytest.raises(InvalidInputError, match="no longer has sink 'output', to which output up to batch 1"):
        start()
    start(abandonOutput="output").awaitTermination()
    start().awaitTermination()


@pytest.mark.parametrize(("guarantee", "calls"), [("at-least-once", 2), ("at-most-once", 1)])
def test_functions_run_before_or_after_the_checkpoint(
    spark: SparkSession,
    make_backend: Backends,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    guarantee: str,
    calls: int,
) -> None:
    """At least once: again with each try of the batch; at most once: only when the checkpoint exists."""
    lost: list[int] = []
    complete = JobSession.complete

    def failing(self: JobSession, checkpoint_id: int, plan: Any) -> Any:
        if not lost:
            lost.append(checkpoint_id)
            raise LostChangesError("the test lost it")
        return complete(self, checkpoint_id, plan)

    monkeypatch.setattr(JobSession, "complete", failing)
    seen: list[int] = []
    write_input(tmp_path / "in", FILES[:1])
    result = totals(make_backend(), read_input(spark, tmp_path / "in"))
    writer = result.writeStream.foreachBatch(lambda batch, _: seen.append(batch.count())).guarantee(guarantee)
    writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start().awaitTermination()
    assert seen == [len(expected(1))] * calls


def test_a_batch_that_is_executed_again_has_its_id_and_rows(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that keeps the batch id with what it writes can leave out what it wrote, also after a restart."""
    seen: list[tuple[int, list[Any]]] = []
    write_input(tmp_path / "in", FILES[:1])

    def run() -> None:
        result = totals(make_backend(), read_input(spark, tmp_path / "in"))
        writer = result.writeStream.foreachBatch(
            lambda batch, batch_id: seen.append((batch_id, sorted(map(tuple, batch.collect()), key=repr)))
        )
        writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start().awaitTermination()

    def failing(self: JobSession, checkpoint_id: int, plan: Any) -> Any:
        raise UnavailableError("the driver ends before the checkpoint exists")

    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "complete", failing)
        with pytest.raises(StreamingQueryException, match="ends before the checkpoint"):
            run()
    write_input(tmp_path / "in", FILES[:2])  # more input has come meanwhile
    run()
    assert [batch_id for batch_id, _ in seen] == [0, 0, 1]
    assert seen[0] == seen[1] == (0, expected(1))


def test_output_lost_at_most_once_is_not_written_again(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """The function fails after the checkpoint: the query ends with its error, and the next start goes on after it."""
    write_input(tmp_path / "in", FILES[:1])

    def start(function: Any) -> Any:
        result = totals(make_backend(), read_input(spark, tmp_path / "in"))
        writer = result.writeStream.foreachBatch(function).guarantee("at-most-once")
        return writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start()

    def failing(batch: DataFrame, batch_id: int) -> None:
        raise RuntimeError("the system is away")

    with pytest.raises(StreamingQueryException, match=r"output of batch 0 is lost .*the system is away"):
        start(failing).awaitTermination()
    seen: list[int] = []
    write_input(tmp_path / "in", FILES[:2])
    start(lambda batch, batch_id: seen.append(batch_id)).awaitTermination()
    assert seen == [1]


@dataclass
class LosesItsShuffle:
    """Appends each row's key to a file; with the first row what the task has still to read of its shuffle is lost."""

    written: Path
    folders: list[Path]

    def __call__(self, row: Any) -> None:
        """Write a row."""
        if not self.written.exists():
            for folder in self.folders:
                for file in folder.glob("*/shuffle_*.data"):
                    file.unlink()
        with self.written.open("a") as written:
            written.write(f"{row.k}\n")


def test_rows_that_moved_are_written_at_most_once(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Spark repeats a whole stage whose shuffle is lost, with tasks that count their attempts from the start."""
    write_input(tmp_path / "in", [[(f"key-{number}", 1.0) for number in range(40)]])
    folder = Path(spark.sparkContext.getConf().get("spark.local.dir", ""))
    function = LosesItsShuffle(tmp_path / "written", list(folder.glob("blockmgr-*")))
    # Far more than fits between Spark and Python: the first row is written before all are read.
    wide = totals(make_backend(), read_input(spark, tmp_path / "in")).withColumn("x", F.expr("repeat('x', 1000000)"))
    writer = wide.repartition(1).writeStream.foreach(function).guarantee("at-most-once")
    writer.option("checkpointLocation", str(tmp_path / "chk")).trigger(availableNow=True).start().awaitTermination()
    assert sorted(function.written.read_text().split()) == sorted(f"key-{number}" for number in range(40))


def test_guarantees_that_cannot_be_kept_are_refused(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """The errors say what to use instead."""
    write_input(tmp_path / "in", FILES[:1])
    result = totals(make_backend(), read_input(spark, tmp_path / "in"))
    location = str(tmp_path / "chk")
    writer = result.writeStream.option("checkpointLocation", location)
    with pytest.raises(InvalidInputError, match="needs a sink that writes once or publishes"):
        writer.foreachBatch(lambda batch, _: None).guarantee("exactly-once").start()
    with pytest.raises(InvalidInputError, match="'sometimes' is unknown; use one of at-most-once"):
        result.writeStream.option("guarantee", "sometimes").format("noop").option(
            "checkpointLocation", location
        ).start()
    with pytest.raises(InvalidInputError, match="publishes exactly once; it cannot be 'at-most-once'"):
        sink = SqliteSink(str(tmp_path / "out.db"))
        result.writeStream.sink(sink).guarantee("at-most-once").option("checkpointLocation", location).start()
    with pytest.raises(InvalidInputError, match="has an operator 'Totals': give the sink another name"):
        result.writeStream.sink(sink, name="Totals").option("checkpointLocation", location).start()
    deferred = totals(make_backend(failover="deferred"), read_input(spark, tmp_path / "in")).writeStream
    with pytest.raises(InvalidInputError, match="failover='deferred' is not possible with a sink of Spark"):
        deferred.format("parquet").option("checkpointLocation", location).start(str(tmp_path / "out"))


def test_spark_options_of_kafka(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """A query with Spark's Kafka sink needs nothing but the guarantee, and a package less."""
    write_input(tmp_path / "in", FILES[:2])
    with KafkaBroker(partitions=1) as broker:
        result = totals(make_backend(), read_input(spark, tmp_path / "in"))
        record = F.to_json(F.struct("k", "n", "s")).alias("value")
        writer = result.select(F.col("k").alias("key"), record).writeStream.format("kafka")
        writer = writer.option("kafka.bootstrap.servers", broker.servers).option("topic", "out")
        writer = writer.option("guarantee", "exactly-once").option("checkpointLocation", str(tmp_path / "chk"))
        writer.trigger(availableNow=True).start().awaitTermination()
        seen = [json.loads(value) for value in committed_values(broker.servers, "out")]

    assert sorted(((row.get("k"), row["n"], row["s"]) for row in seen), key=repr) == expected(2)


def set_back(tmp_path: Path, kind: str, target: str) -> None:
    """Rewind the stopped job."""
    storage = f"file://{tmp_path / 'store'}"
    assert main(["rewind", "--storage", storage, kind, target, "--write", "job"]) == 0


def first_savepoint(tmp_path: Path) -> str:
    """Return the savepoint of the first branch's end."""
    job_store = JobStore(open_store(f"file://{tmp_path / 'store'}"), "job", SystemClock(), SystemIds())
    job_store.open(None)
    return next(name for name, manifest in job_store.savepoints.all() if manifest.ref.branch == 0)
