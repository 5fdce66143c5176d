"""
The library's uses of private interfaces of Spark and pandas, on the running version.

``make test-versions`` runs this on each supported minor version. A failure names an interface that a new version has
changed; ``backend_client/spark/private`` is the one place to adapt.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyspark
import pytest
from py4j.java_gateway import GatewayClient
from py4j.protocol import MEMORY_COMMAND_NAME, REFLECTION_COMMAND_NAME, Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from backend_client import ChangelogStateBackend
from backend_client.batch_time import BatchTime
from backend_client.spark.columns import grouping_columns
from backend_client.spark.driver.kept_output import LOST_BLOCK
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.failover.rehearsal import failing
from backend_client.spark.own_session import own_session
from backend_client.spark.private import frames, located, session, sinks
from backend_client.spark.private.frame_maker import FrameMaker, Steps
from backend_client.spark.private.job_record import JobRecord
from backend_client.spark.private.py4j_lookups import keep_lookups
from backend_client.spark.private.stream_plan import stateful_operators
from backend_client.spark.private.worker_connection import connection_to_spark
from storage.errors import ConflictError, InvalidInputError
from tests.e2e.support import INPUT, OUTPUT, Totals, read_input, write_input
from tests.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.e2e]

VALUES = "i int, l long, d double, s string, b boolean, t timestamp, n timestamp_ntz, a array<int>, m map<string,int>"
MANY_TYPES = f"{VALUES}, st struct<x:int,y:timestamp>, dt date, c decimal(10,2), bin binary"


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """Return a stream of files, with one of them present."""
    write_input(tmp_path / "in", [[("a", 1.0)]])
    return read_input(spark, tmp_path / "in")


def test_version_is_served() -> None:
    """The running version is one of those that the errors name."""
    first, last = (tuple(map(int, text.split("."))) for text in session.SERVED.split(" to "))

    assert first <= tuple(map(int, pyspark.__version__.split(".")[:2])) <= last


def test_worker_finds_its_connection(spark: SparkSession) -> None:
    """The connection that a worker has acknowledge at once is the one over which Spark sends its input."""

    def compared(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        frame = inspect.currentframe()
        while frame is not None and "infile" not in frame.f_locals:
            frame = frame.f_back
        assert frame is not None
        own, found = os.fstat(frame.f_locals["infile"].fileno()), connection_to_spark()
        for _ in batches:
            is_same = found is not None and os.fstat(found.fileno()).st_ino == own.st_ino
            yield pa.RecordBatch.from_pydict({"is_same": [is_same]})

    rows = spark.range(0, 4, 1, 4).mapInArrow(compared, "is_same boolean").collect()

    assert [row.is_same for row in rows] == [True] * 4


def test_frame_leads_to_places(spark: SparkSession) -> None:
    """A frame with places has the numbers and partitions of the plain one, and is joined to rows without a shuffle."""
    own = own_session(spark)
    numbered = own.range(3).select(F.col("id").cast("int").alias("p")).repartitionById(3, "p")
    rows = spark.range(12).select((F.col("id") % 3).cast("int").alias("p"), "id").repartitionById(3, "p")

    frame = located.located(numbered, [[located.executor_location("7", "far")], ["near", "far"], []])
    joined = rows.join(frame.hint("shuffle_hash"), "p").select("p", F.spark_partition_id().alias("at"), "id")

    assert [(row.p, row.at) for row in joined.select("p", "at").distinct().orderBy("p").collect()] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert joined.count() == 12
    assert plan_of(joined).count("Exchange") == 1


def test_executors_are_known(spark: SparkSession) -> None:
    """In local mode there is the driver's address and no executor; one that Spark has not recorded yet is awaited."""
    addresses = located.executor_addresses(spark)

    assert re.fullmatch(r"\S+:\d+", addresses)
    assert located.executors_at(spark, addresses) == []
    assert located.executor_ids(spark) == frozenset()
    assert located.executors_at(spark, f"{addresses} elsewhere:1") is None


@pytest.mark.parametrize("has_copy", [False, True])
def test_tasks_of_a_lost_executor_run_elsewhere(spark: SparkSession, has_copy: bool) -> None:
    """A task whose executor is gone would wait for as long as Spark is told to; with a copy it waits for its host."""
    address = socket.getfqdn(spark.conf.get("spark.driver.host") or "")
    gone, here = located.executor_location("7", "gone"), located.executor_location("driver", address)
    numbered = own_session(spark).range(2).select(F.col("id").cast("int").alias("p")).repartitionById(2, "p")
    places = [[gone, *([address] if has_copy else [])], [here]]
    done: list[int] = []
    thread = InheritableThread(target=lambda: done.append(len(located.located(numbered, places).collect())))
    thread.start()
    wait_until(lambda: located.end_waits(spark, ["8", "7"]) == 1, what="the task that waits")
    thread.join(60)
    assert done == [2]


def test_tasks_that_wait_for_others_keep_their_places(spark: SparkSession) -> None:
    """Nothing is changed for a stage in which a task waits for another executor than those that are lost."""
    places = [[located.executor_location(executor, "gone")] for executor in "78"]
    address = socket.getfqdn(spark.conf.get("spark.driver.host") or "")
    numbered = own_session(spark).range(0, 3, 1, 1).select(F.col("id").cast("int").alias("p")).repartitionById(3, "p")
    places.append([located.executor_location("driver", address)])
    done: list[int] = []
    thread = InheritableThread(target=lambda: done.append(len(located.located(numbered, places).collect())))
    thread.start()
    tracker = spark.sparkContext.statusTracker()

    def two_wait() -> bool:
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return any(stage is not None and (stage.numTasks, stage.numCompletedTasks) == (3, 1) for stage in stages)

    wait_until(two_wait, what="the task that waits for nobody")
    assert located.end_waits(spark, ["7"]) == 0
    assert located.end_waits(spark, ["7", "8"]) == 2
    thread.join(60)
    assert done == [3]


def test_error_within_an_expression_is_dropped(spark: SparkSession) -> None:
    """The rehearsal of executors makes one of Spark's own errors in each row, and yields no error."""
    rows = spark.range(0, 3, 1, 1)
    assert [row.x for row in rows.selectExpr(f"{failing('id')} as x").collect()] == [True] * 3
    with pytest.raises(PySparkException, match="CONVERSION_INVALID_INPUT"):
        rows.selectExpr(failing("id").replace("try_", "")).collect()


def test_executor_can_be_given_up(spark: SparkSession) -> None:
    """The interface that gives an executor up exists, although a local master has no executors."""
    jvm = session.jvm_of(spark)
    backend = jvm.java.lang.Class.forName("org.apache.spark.scheduler.cluster.CoarseGrainedSchedulerBackend")
    kinds = [
        [str(kind.getName()) for kind in m.getParameterTypes()]
        for m in backend.getMethods()
        if m.getName() == "removeExecutor"
    ]

    assert kinds == [["java.lang.String", "org.apache.spark.scheduler.ExecutorLossReason"]]
    with pytest.raises(InvalidInputError, match="removeExecutor"):
        located.remove_executor(spark, "7", "it is not there")


def test_running_tasks_run_again(spark: SparkSession, tmp_path: Path) -> None:
    """Tasks of a group's jobs are killed and succeed when they run again; those of no job are none."""
    begun = tmp_path / "begun"

    def hang_once(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not begun.exists():
            begun.touch()
            time.sleep(600)
        yield from batches

    def work() -> None:
        spark.sparkContext.setJobGroup("the group", "")
        done.append(spark.range(3, numPartitions=1).mapInArrow(hang_once, "id long").count())

    done: list[int] = []
    assert located.kill_tasks(spark, "the group", "there is none") == 0
    thread = InheritableThread(target=work)
    thread.start()
    wait_until(
        lambda: begun.exists() and located.kill_tasks(spark, "the group", "as a test") == 1, what="a killed task"
    )
    thread.join(60)

    assert done == [3]


def plan_of(frame: DataFrame) -> str:
    """Return a frame's physical plan as text."""
    return str(session.java_frame(frame).queryExecution().executedPlan().toString())


def test_session_is_known(spark: SparkSession) -> None:
    """A session has its own id, and a JVM."""
    assert session.is_classic(spark)
    assert not session.is_classic(object())
    assert session.session_id_of(spark) != session.session_id_of(spark.newSession())
    assert not session.is_stopped(spark.sparkContext)


@pytest.mark.parametrize(
    "name",
    [
        "spark.sql.adaptive.enabled",
        "spark.sql.caseSensitive",
        "spark.sql.execution.arrow.maxBytesPerBatch",
        "spark.sql.execution.arrow.maxRecordsPerBatch",
        "spark.sql.execution.pandas.convertToArrowArraySafely",
        "spark.sql.inMemoryColumnarStorage.compressed",
        "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName",
        "spark.sql.session.timeZone",
        "spark.sql.sources.default",
    ],
)
def test_setting_is_known(spark: SparkSession, name: str) -> None:
    """Settings that the library reads have Spark's defaults."""
    assert session.setting(spark, name, "of ours") != "of ours"


def test_unknown_setting_has_the_default(spark: SparkSession) -> None:
    """A setting that this version does not know has the given default."""
    assert session.setting(spark, "spark.sql.of.another.version", "of ours") == "of ours"


@pytest.mark.usefixtures("spark")
def test_schema_is_parsed() -> None:
    """Spark's public parser parses schema texts; it only needs a session to exist."""
    assert DataType.fromDDL("a int, b string").jsonValue() == StructType.fromDDL("a int, b string").jsonValue()


def test_grouping_is_read(spark: SparkSession, stream: DataFrame) -> None:
    """The columns of a groupBy are distinguished from other expressions, and the grouped frame is found."""
    grouped = stream.groupBy("k", F.col("v"), (F.col("v") + 1))

    assert session.is_classic_grouped(grouped)
    assert isinstance(grouped, GroupedData)
    assert session.grouping_expressions(grouped)[:2] == [("k", True), ("v", True)]
    assert not session.grouping_expressions(grouped)[2][1]
    assert session.grouped_frame(grouped).columns == ["k", "v"]


@pytest.mark.parametrize("kind", ["rollup", "cube", "pivot", "groupingSets"])
def test_other_groupings_are_told(stream: DataFrame, kind: str) -> None:
    """They look the same but for their kind: their subtotals and columns would be left out."""
    grouped: Any = {
        "rollup": lambda: stream.rollup("k"),
        "cube": lambda: stream.cube("k"),
        "pivot": lambda: stream.groupBy("k").pivot("v", [1]),
        "groupingSets": lambda: stream.groupingSets([["k"], []], "k"),
    }[kind]()

    with pytest.raises(InvalidInputError, match=rf"(?i)takes the result of groupBy\(columns\), not of a {kind}"):
        grouping_columns(grouped)


def test_column_with_a_dot_is_not_a_field(stream: DataFrame) -> None:
    """A quoted name is a column's, whatever its characters; an unquoted dot names a field of a struct."""
    frame = stream.select(F.col("k").alias("a.b"), F.col("v").alias("c`d"), F.struct("v").alias("a"))
    grouped = frame.groupBy("`a.b`", frame["`c``d`"], "a.v")

    assert session.grouping_expressions(grouped) == [("a.b", True), ("c`d", True), ("a.v", False)]
    assert grouping_columns(frame.groupBy("`a.b`", "`c``d`")) == ("a.b", "c`d")
    with pytest.raises(InvalidInputError, match=r"takes columns; 'a\.v'"):
        grouping_columns(grouped)


def test_column_of_an_alias_is_a_column(spark: SparkSession, stream: DataFrame) -> None:
    """As on Spark, a column may be named with the alias of its side of a join, unless both sides have it."""
    joined = stream.alias("a").join(spark.range(3).selectExpr("id", "id as v").alias("b"), F.expr("a.v = b.id"))

    assert grouping_columns(joined.groupBy("a.k", "b.id")) == ("k", "id")
    for text in ("a.v", "a.nothing"):
        with pytest.raises(InvalidInputError, match="takes columns"):
            grouping_columns(joined.groupBy(text))


def test_sources_of_a_stream_are_known(spark: SparkSession, stream: DataFrame) -> None:
    """In the order in which an offsets entry has them: one that is used twice counts twice, a static frame does not."""
    rate = spark.readStream.format("rate").option("rowsPerSecond", "7").load().selectExpr("cast(value as string) k")
    joined = stream.select("k").unionAll(rate).join(spark.range(3), how="cross").select("k").unionAll(rate)
    first, *rates = session.stream_sources(joined)

    assert first == ("StreamingRelation", {})
    assert rates == [("rate", {"rowsPerSecond": "7"})] * 2


def test_methods_of_groups_can_be_replaced() -> None:
    """The methods that install replaces belong to the class itself."""
    assert {"transformWithState", "transformWithStateInPandas"} <= set(dir(GroupedData))
    assert {"transformWithState", "transformWithStateInPandas"} <= set(GroupedData.__dict__) | set(
        *(base.__dict__ for base in GroupedData.__mro__[1:2])
    )


@pytest.mark.parametrize(
    ("node", "plan"),
    [
        ("Aggregate", lambda frame: frame.select(F.sum("v"))),
        ("Window", lambda frame: frame.selectExpr("sum(v) over (partition by k)")),
        ("Join", lambda frame: frame.join(frame.sparkSession.range(1).selectExpr("'a' as k"), "k", "right")),
    ],
)
def test_plan_names_its_nodes(spark: SparkSession, node: str, plan: Callable[[DataFrame], DataFrame]) -> None:
    """Operations over many rows are found in the analyzed plan by their names, joins with their types."""
    nodes = dict(session.stream_side_nodes(plan(spark.createDataFrame([], INPUT))))

    assert node in nodes
    assert nodes.get("Join") in (None, "RightOuter")


def test_subqueries_are_found(spark: SparkSession) -> None:
    """Spark makes joins of them, after which rows may be in other partitions."""
    rows = spark.createDataFrame([], INPUT)
    spark.range(1).selectExpr("'a' as k").createOrReplaceTempView("some_keys")
    conditions = ("k = 'a'", "k in (select k from some_keys)", "exists (select 1 from some_keys s where s.k <=> k)")
    assert [session.has_subquery(rows.where(condition)) for condition in conditions] == [False, True, True]


@pytest.mark.parametrize(
    ("found", "plan"),
    [
        ([], lambda stream: stream.where("v > 0").withColumn("k", F.upper("k"))),
        ([], lambda stream: stream.join(stream.sparkSession.range(3).groupBy("id").count(), F.col("id") > 0)),
        (["Aggregate"], lambda stream: stream.groupBy("k").count().select("k")),
        (["Deduplicate"], lambda stream: stream.dropDuplicates(["k"])),
        (["GlobalLimit"], lambda stream: stream.limit(3)),
        (["Join", "Aggregate"], lambda stream: stream.join(stream.groupBy("k").count(), "k")),
        (
            ["FlatMapGroupsInPandasWithState"],
            lambda stream: stream.groupBy("k").applyInPandasWithState(
                _nothing, "k string", "n long", "update", "NoTimeout"
            ),
        ),
    ],
)
def test_stateful_operators_of_spark_are_known(
    stream: DataFrame, found: list[str], plan: Callable[[DataFrame], DataFrame]
) -> None:
    """Only what keeps state between batches of a stream is found; an aggregation of a table keeps none."""
    assert stateful_operators(plan(stream)) == found


def _nothing(key: object, frames: Iterable[pd.DataFrame], state: object) -> Iterator[pd.DataFrame]:
    yield from frames


def test_failed_jobs_are_known(spark: SparkSession) -> None:
    """Spark reports why jobs that read lost blocks failed, once its record has their ends."""
    frame = spark.range(4).localCheckpoint(eager=False)
    rdd = session.local_checkpoint(frame)
    jobs = JobRecord(spark, rdd)
    assert frame.count() == 4
    wait_until(lambda: not jobs.is_behind(), what="the record of the job")
    assert [*jobs.failures()] == []

    rdd.unpersist(True)
    with pytest.raises(Exception, match=LOST_BLOCK):
        frame.count()
    later = JobRecord(spark, rdd)

    wait_until(lambda: not jobs.is_behind(), what="the record of the failed job")
    assert len([*jobs.failures()]) == 1
    assert all(LOST_BLOCK in reason for reason in jobs.failures())
    assert not later.is_behind()
    assert [*later.failures()] == []


def questions_to_jvm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with each question to the JVM; letting go of an object is none."""
    asked: list[str] = []
    send = GatewayClient.send_command

    def noted(client: GatewayClient, command: str, *options: Any, **named: Any) -> Any:
        asked.extend([] if command.startswith(MEMORY_COMMAND_NAME) else [command])
        return send(client, command, *options, **named)

    monkeypatch.setattr(GatewayClient, "send_command", noted)
    return asked


def test_lookups_are_kept(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is made without asking the JVM again for the classes that PySpark names for each call."""
    asked = questions_to_jvm(monkeypatch)

    def lookups() -> list[str]:
        asked.clear()
        assert spark.range(4).selectExpr("id").sortWithinPartitions("id").where(F.col("id") > 2).count() == 1
        return [command for command in asked if command.startswith(REFLECTION_COMMAND_NAME)]

    jvm, kept = vars(session.jvm_of(spark)), {"PythonUtils", "org.apache.spark.sql.functions"}
    for name in kept & jvm.keys():  # by an earlier query
        monkeypatch.delitem(jvm, name)
    assert all(any(name in command for command in lookups()) for name in kept)

    keep_lookups(spark)

    assert not any(name in command for command in lookups() for name in kept)


def test_frames_are_those_of_the_public_methods(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's frame is equal to the one that PySpark makes, and asks the JVM about once for each step."""
    rows = spark.range(0, 40, 1, 2).selectExpr("id", "id % 7 as `a.b`", "cast(id as string) as s")
    schema = StructType().add("p", "long").add("id", "long").add("s", "string")
    maker = FrameMaker.of(rows)
    factor = spark.sparkContext.broadcast(3)

    def times(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            tripled = pa.array([number * factor.value for number in batch.column(1).to_pylist()], pa.int64())
            yield pa.RecordBatch.from_arrays([batch.column(0), tripled, batch.column(2)], ["p", "id", "s"])

    def placed() -> Steps:
        steps = maker.steps(rows).select_expr("id % 3 as p", "id", "s")
        return steps.repartition_by_id(3, "cast(p as int)").sort_within_partitions("p", "s")

    def made() -> DataFrame:
        return placed().map_in_arrow(("p", "id", "s"), times, schema)

    made()
    asked = questions_to_jvm(monkeypatch)
    mapped = made()
    assert len(asked) <= 15
    asked.clear()
    found = maker.steps(mapped).drop_last().frame()
    assert len(asked) <= 5
    expected = rows.selectExpr("id % 3 as p", "id", "s").repartitionById(3, F.expr("cast(p as int)"))
    expected = expected.sortWithinPartitions("p", "s")

    assert placed().frame().sameSemantics(expected)
    assert found.schema == expected.mapInArrow(times, schema).drop("s").schema
    assert found.collect() == expected.mapInArrow(times, schema).drop("s").collect()
    found = mapped.where("id > 9")
    kept = found.selectExpr("id", "nullif(s, '5') as s").localCheckpoint(eager=False)
    assert sorted(maker.texts(kept), key=int) == [str(number) for number in (4, *range(6, 40))]
    assert kept.count() == 36
    assert maker.texts(found.where("id < 0").localCheckpoint(eager=False)) == []

    def unlisted(ids: str) -> list[int]:
        some, value = rows.where(f"id in ({ids})"), "concat(',', s, ',')"
        left = maker.steps(some).where_unlisted("id < 5", value, ",5,39,", "raise_error(s)").frame()
        return [row.id for row in left.collect()]

    assert unlisted("1, 4, 5, 39") == [1, 4]
    with pytest.raises(PySparkException, match="38"):
        unlisted("1, 38")


def test_tasks_of_receipts_have_set_limits(spark: SparkSession) -> None:
    """The job that computes an operator's output gets settings by local properties: Spark counts it as no query."""
    limit = "spark.sql.execution.arrow.maxRecordsPerBatch"
    context: Any = spark.sparkContext

    def sizes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"size": [str(len(batch))]})

    kept = spark.range(0, 8, 1, 1).mapInArrow(sizes, "size string").localCheckpoint(eager=False)
    context.setLocalProperty(limit, "5")
    try:
        assert FrameMaker.of(kept).texts(kept) == ["5", "3"]
    finally:
        context.setLocalProperty(limit, None)


def test_large_function_and_added_file_reach_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """A function that Spark broadcasts is left to Spark; a file that is added later is known to the next function."""
    rows, schema = spark.range(4), StructType().add("id", "long")
    maker, large = FrameMaker.of(rows), os.urandom(2 << 20)
    name = f"added_{uuid.uuid4().hex}"

    def sized(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"id": [len(large)] * len(batch)})

    def imported(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"id": [importlib.import_module(name).NUMBER] * len(batch)})

    assert {row.id for row in maker.steps(rows).map_in_arrow(("id",), sized, schema).collect()} == {2 << 20}
    (tmp_path / f"{name}.py").write_text("NUMBER = 7")
    spark.sparkContext.addPyFile(str(tmp_path / f"{name}.py"))
    assert {row.id for row in maker.steps(rows).map_in_arrow(("id",), imported, schema).collect()} == {7}


def test_watermark_is_in_the_schema(stream: DataFrame) -> None:
    """A column with a watermark has its delay in the schema, in milliseconds."""
    marked = stream.withColumn("t", F.current_timestamp()).withWatermark("t", "3 seconds")

    assert marked.schema["t"].metadata[DELAY_KEY] == 3000


def test_checkpoint_is_text_as_read(spark: SparkSession, stream: DataFrame, tmp_path: Path) -> None:
    """Spark's checkpoint has an id, a batch's offsets with its time, and the commit, in the expected format."""
    location = tmp_path / "chk"
    marked = stream.withColumn("t", F.timestamp_millis(F.lit(5000))).withWatermark("t", "1 second")
    query = marked.writeStream.format("noop").option("checkpointLocation", str(location))
    query.trigger(availableNow=True).start().awaitTermination()
    folder, files = session.hadoop_folder(spark, str(location))

    assert files.exists(session.hadoop_path(spark, folder, "offsets/0"))
    assert json.loads((location / "metadata").read_text())["id"]
    assert BatchTime.read((location / "offsets/0").read_text(), None).timestamp_ms > 0
    assert re.fullmatch(r'v1\n\{"nextBatchWatermarkMs":\d+.*\}', (location / "commits/0").read_text().strip())


def test_table_of_the_catalog(spark: SparkSession) -> None:
    """Spark's own catalog has a table's format, folder and partitions; a missing table is Spark's error."""
    spark.sql("create table private_table (a int, b int) using parquet partitioned by (b)")
    try:
        table = session.catalog_table(spark, "private_table")
        assert table.provider().get() == "parquet"
        assert str(table.location().getPath()).endswith("private_table")
        assert table.partitionColumnNames().apply(0) == "b"
    finally:
        spark.sql("drop table private_table")
    with pytest.raises(PySparkException):
        session.catalog_table(spark, "no_such_table")


def test_file_sink_writes_each_batch_once(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's file sink writes a batch's rows, and skips a batch that it already has; an earlier one is an error."""
    found = sinks.Format(spark, "json")
    assert (found.is_of_files, found.is_stream_sink) == (True, False)
    write = found.file_sink(str(tmp_path / "out"), ["k"], {"Compression": "none"})

    for _ in range(2):
        write(spark.createDataFrame([("a", 1.0)], INPUT), 0)

    assert [tuple(row) for row in spark.read.schema(INPUT).json(str(tmp_path / "out")).collect()] == [("a", 1.0)]
    assert (tmp_path / "out" / "k=a").is_dir()
    write.check_unused(1)
    write(spark.createDataFrame([("b", 1.0)], INPUT), 1)
    with pytest.raises(ConflictError, match="has batches up to 1 of another query"):
        write(spark.createDataFrame([("c", 1.0)], INPUT), 0)


def test_stream_sink_is_made_by_its_provider(spark: SparkSession) -> None:
    """Providers of Spark's first streaming interface create a sink with the given options; Spark itself has none."""
    loader = session.jvm_of(spark).java.lang.Thread.currentThread().getContextClassLoader()
    methods = loader.loadClass(sinks._STREAM_SINK).getMethods()
    kinds = [str(kind.getName()) for method in methods for kind in method.getParameterTypes()]

    assert [method.getName() for method in methods] == ["createSink"]
    assert kinds == [
        "org.apache.spark.sql.SQLContext",
        "scala.collection.immutable.Map",
        "scala.collection.immutable.Seq",
        "org.apache.spark.sql.streaming.OutputMode",
    ]
    assert not sinks.Format(spark, "console").is_stream_sink
    assert session.java_session(spark).sqlContext() is not None
    assert str(session.jvm_of(spark).org.apache.spark.sql.streaming.OutputMode.Append()) == "Append"


def test_unknown_format_is_an_error(spark: SparkSession) -> None:
    """An unknown format is distinguished from a missing interface."""
    with pytest.raises(InvalidInputError, match="does not find the format 'unheard_of'"):
        sinks.Format(spark, "unheard_of")


def test_memory_sink_is_a_table(spark: SparkSession) -> None:
    """Spark's memory sink is a table that grows with each batch."""
    batch = spark.createDataFrame([("a", 1.0)], INPUT)
    write = sinks.memory_sink(spark, batch.schema, "private_memory")

    write(batch, 0)
    write(batch, 1)

    assert spark.table("private_memory").count() == 2


class Uncaught:
    """Takes the errors by which threads of the JVM end."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def uncaughtException(self, thread: Any, error: Any) -> None:
        """Note one, as Java calls this."""
        self.found.append(f"{thread.getName()}: {error.getClass().getName()}")

    class Java:
        """Its counterpart in the JVM."""

        implements: ClassVar[list[str]] = ["java.lang.Thread$UncaughtExceptionHandler"]


def test_query_is_stopped_within_a_batch(
    spark: SparkSession, stream: DataFrame, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """Spark recognizes the interruption of a batch; the query's thread does not end by an overflow of its stack."""
    begun = threading.Event()

    def endless(batch: DataFrame, batch_id: int) -> None:
        begun.set()
        spark.range(0, 10**13, 1, 2).selectExpr("sum(id % 7)").collect()

    uncaught, threads = Uncaught(), session.jvm_of(spark).java.lang.Thread
    ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
    result = make_backend().transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")
    writer = result.writeStream.foreachBatch(endless).option("checkpointLocation", str(tmp_path / "chk"))
    threads.setDefaultUncaughtExceptionHandler(uncaught)
    try:
        query = writer.start()
        stages = spark.sparkContext.statusTracker().getActiveStageIds
        wait_until(lambda: begun.is_set() and stages(), what="the function's job")
        query.stop()
    finally:
        threads.setDefaultUncaughtExceptionHandler(None)

    assert query.exception() is None
    assert uncaught.found == []


def test_types_come_back_from_arrow(spark: SparkSession) -> None:
    """Spark's types become Arrow's and back, timestamps in UTC or without a zone."""
    schema = StructType.fromDDL(MANY_TYPES)
    assert isinstance(schema, StructType)

    assert frames.arrow_schema(schema).field("t").type == pa.timestamp("us", "UTC")
    assert frames.arrow_schema(schema).field("n").type == pa.timestamp("us")
    assert frames.spark_schema(frames.arrow_schema(schema)).simpleString() == schema.simpleString()
    assert frames.spark_type(frames.arrow_type(schema)).simpleString() == schema.simpleString()


def test_values_are_converted(spark: SparkSession) -> None:
    """In frames, structs are dictionaries with timestamps in the session's zone; they are converted back unchanged."""
    kind = DataType.fromDDL("struct<x:int,y:timestamp>")
    column = pa.array([{"x": 1, "y": pd.Timestamp(0, tz="UTC")}], frames.arrow_type(kind))
    series = column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=True)

    given = frames.converter_to_pandas(kind, "Asia/Tokyo")(series)[0]
    returned = frames.converter_from_pandas(kind, "Asia/Tokyo")(pd.Series([given]))[0]

    assert given == {"x": 1, "y": pd.Timestamp("1970-01-01 09:00")}
    assert pd.Timestamp(returned["y"]).tz_convert("UTC") == pd.Timestamp(0, tz="UTC")


FRAME = pd.DataFrame(
    {
        "i": [1, 2, 3],
        "o": ["a", None, "c"],
        "d": [0.5, 1.5, 2.5],
        "t": pd.to_datetime([1, 2, 3]),
        "j": [4, 5, 6],
        "z": pd.to_datetime([1, 2, 3], utc=True),
        "c": pd.Categorical(["x", "y", "x"]),
    }
)


@pytest.fixture(params=["with pandas' blocks", "without them"])
def pandas_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return pandas as it is, or with another internal layout of frames; and whether it has blocks."""
    with_blocks: bool = request.param == "with pandas' blocks"
    if not with_blocks:
        monkeypatch.setattr(frames, "BlockManager", None)
        monkeypatch.delattr("pandas.core.internals.managers.BlockManager.column_arrays")
    return with_blocks


def test_frames_are_sliced(pandas_of: bool) -> None:
    """A slice of a frame has its rows with an index from 0, with and without blocks."""
    from_arrow = FRAME.drop(columns="c")  # the columns of a frame made from Arrow
    sliced = frames.SlicedFrame(from_arrow)

    assert (sliced._blocks is not None) is pandas_of
    for start, stop in ((0, 3), (1, 3), (2, 2)):
        for parts, frame in ((sliced, from_arrow), (frames.SlicedFrame(FRAME), FRAME)):
            pd.testing.assert_frame_equal(parts.part(start, stop), frame.iloc[start:stop].reset_index(drop=True))


def test_arrays_of_frames(pandas_of: bool) -> None:
    """The columns of a frame are arrays of the same types and values, with and without blocks."""
    for frame in (FRAME, FRAME.select_dtypes(["int", "float", "datetime"])):
        arrays = frames.column_arrays(frame)

        assert [array.dtype for array in arrays] == [*frame.dtypes]
        for name, array in zip(frame.columns, arrays, strict=True):
            assert isinstance(array, np.ndarray) is isinstance(frame[name].dtype, np.dtype)
            pd.testing.assert_series_equal(pd.Series(array, dtype=array.dtype), frame[name], check_names=False)


@pytest.mark.parametrize("error", [AttributeError("no x"), TypeError("'JavaPackage' object is not callable")])
def test_missing_interface_is_named(error: Exception) -> None:
    """For a missing interface, the error has its name, the versions that have it, and the remedy."""
    with (
        pytest.raises(InvalidInputError, match=r"FileStreamSink of PySpark 4\.1 to 4\.3: use foreachBatch"),
        session.needed("FileStreamSink", "use foreachBatch"),
    ):
        raise error


def test_missing_class_of_the_jvm_is_named(spark: SparkSession) -> None:
    """A missing class or method of the JVM raises the same error."""
    with pytest.raises(InvalidInputError, match="AnotherSink"), session.needed("AnotherSink", "use foreachBatch"):
        session.jvm_of(spark).org.apache.spark.sql.execution.streaming.sinks.AnotherSink(1)
    with pytest.raises(InvalidInputError, match="anotherMethod"), session.needed("anotherMethod", "leave it"):
        session.java_session(spark).anotherMethod()
    assert not session.is_a(spark, session.java_session(spark), "org.apache.spark.sql.AnotherClass")
    assert issubclass(Py4JError, Exception)


def test_error_of_spark_is_unchanged(spark: SparkSession) -> None:
    """Spark's own errors are not reported as missing interfaces."""
    with pytest.raises(PySparkException), session.needed("a parser", "use another"):
        DataType.fromDDL("a of no type")
