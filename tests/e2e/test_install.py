"""One line switches a program to this backend: the same function with and without it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count
from backend_client.spark.api.plan import StatefulDataFrame
from storage.errors import InvalidInputError
from tests.e2e.support import INPUT, OUTPUT, Collected, Totals, random_input, read_input, run_to_end, write_input

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
FILES = random_input(seed=40, batches=2, rows=60, keys=12)
PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class PandasTotals(Totals):
    """The same in the pandas API."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n, s = self.totals.get() or (0, 0.0)
        for frame in rows:
            n, s = n + len(frame), s + frame["v"].sum()
        self.totals.update((n, s))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "s": [s]})


def program(spark: SparkSession, folder: Path, name: str, *, pandas: bool) -> dict[int, list[Any]]:
    """A user's program, which knows only Spark."""
    collected = Collected()
    stream = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    grouped = stream.filter(F.col("v") >= 10).groupBy(stream["k"])
    if pandas:
        totals = grouped.transformWithStateInPandas(PandasTotals(), OUTPUT, "Update", "None")
    else:
        totals = grouped.transformWithState(
            statefulProcessor=Totals(), outputStructType=OUTPUT, outputMode="Update", timeMode="None"
        )
    static = spark.createDataFrame([("key-1", "one"), ("key-2", "two")], "k string, word string")
    result = (
        totals.join(static, "k", "left")
        .na.fill("none", ["word"])
        .withColumn("mean", totals["s"] / totals.n)
        .filter(F.col("n") > 1)
    )
    query = (
        result.writeStream.queryName(name)
        .outputMode("update")
        .option("checkpointLocation", str(folder / f"checkpoint-{name}"))
        .trigger(availableNow=True)
        .foreachBatch(collected)
        .start()
    )
    query.awaitTermination()
    assert query.exception() is None
    return collected.batches


@pytest.fixture
def rocksdb(spark: SparkSession) -> Any:
    """Spark's own operator needs its RocksDB store."""
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDER)
    yield
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", str(before))


def test_unchanged_program_gives_the_same(
    spark: SparkSession, rocksdb: None, make_backend: Backends, tmp_path: Path
) -> None:
    """I14: a program that knows only Spark gives the same output with one line before it, in both APIs."""
    write_input(tmp_path / "in", FILES)
    backend = make_backend()

    theirs = program(spark, tmp_path, "theirs", pandas=False)
    with backend.install(spark):
        ours = program(spark, tmp_path, "rows", pandas=False)
        frames = program(spark, tmp_path, "frames", pandas=True)

    assert len(theirs) == 2
    assert ours == theirs
    assert frames == theirs
    assert [(p.job, p.batch_id) for p in backend.recent_progress] == [
        *(("job.rows", batch) for batch in range(2)),
        *(("job.frames", batch) for batch in range(2)),
    ]


def test_uninstall_gives_sparks_operator_back(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Installation affects one session only; after uninstalling, the class is unchanged."""
    write_input(tmp_path / "in", FILES[:1])
    original = GroupedData.transformWithState
    other = spark.newSession()

    def transformed(session: SparkSession) -> Any:
        stream = read_input(session, tmp_path / "in")
        return stream.groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")

    installation = make_backend().install(spark)
    with pytest.raises(InvalidInputError, match=r"call ChangelogStateBackend\.uninstall\(spark\) first"):
        make_backend("other").install(spark)
    assert isinstance(transformed(spark), StatefulDataFrame)
    assert isinstance(transformed(other), DataFrame)
    installation.uninstall()
    installation.uninstall()

    assert isinstance(transformed(spark), DataFrame)
    assert GroupedData.transformWithState is original


def test_install_can_be_repeated_without_the_installation(spark: SparkSession, make_backend: Backends) -> None:
    """A notebook's cell that calls `install` can be run again, although nothing holds the first `Installation`."""
    original = GroupedData.transformWithState
    forgotten = make_backend().install(spark)
    ChangelogStateBackend.uninstall(spark)
    ChangelogStateBackend.uninstall(spark)
    assert GroupedData.transformWithState is original

    with make_backend("other").install(spark):
        forgotten.uninstall()  # does not undo the second one
        assert GroupedData.transformWithState is not original
    assert GroupedData.transformWithState is original


def test_chain_of_one_class_is_numbered(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Two operators of one processor class in a chain get separate names; unnamed queries may run one at a time."""
    write_input(tmp_path / "in", FILES)
    collected = Collected()
    with make_backend().install(spark):
        first = read_input(spark, tmp_path / "in").groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")
        between = first.select(F.col("n").cast("string").alias("k"), F.col("s").alias("v"))
        second = between.groupBy("k").transformWithStateInPandas(PandasTotals(), OUTPUT, "Update", "None")
        third = cast(  # Spark's type hints do not know the installed method
            "StatefulDataFrame",
            second.selectExpr("k", "s as v").groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None"),
        )
        assert [operator.name for operator in third.statefulQuery.operators] == ["Totals", "PandasTotals", "Totals-2"]
        assert not any(operator.is_named for operator in third.statefulQuery.operators)

        writer = third.writeStream.foreachBatch(collected).option("checkpointLocation", str(tmp_path / "chk"))
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            query.processAllAvailable()
            with pytest.raises(InvalidInputError, match="name the queries with queryName"):
                first.writeStream.format("noop").start(checkpointLocation=str(tmp_path / "chk2"))
        finally:
            query.stop()

    assert sorted(collected.batches) == [0, 1]


def test_columnar_operator_follows_an_installed_one(
    spark: SparkSession, make_backend: Backends, tmp_path: Path
) -> None:
    """The installed backend's columnar operators join the chain, in the query's job; those of another are refused."""
    write_input(tmp_path / "in", FILES)
    backend, collected = make_backend(), Collected()
    with backend.install(spark):
        totals = read_input(spark, tmp_path / "in").groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")
    keys, rows = cast("StatefulDataFrame", totals).groupBy("k"), Aggregate(Count(name="rows"))
    with pytest.raises(InvalidInputError, match="belong to different backends"):
        make_backend("other").transform_columns(keys, rows)

    writer = backend.transform_columns(keys, rows).writeStream.outputMode("update").queryName("mixed")
    run_to_end(writer, tmp_path / "chk", collected)

    given = [{key for key, _ in file} for file in FILES]
    expected = {
        batch: sorted(((k, sum(k in file for file in given[: batch + 1])) for k in given[batch]), key=repr)
        for batch in (0, 1)
    }
    assert collected.batches == expected
    assert {progress.job for progress in backend.recent_progress} == {"job.mixed"}


def test_unsupported_use_is_refused(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Batch DataFrames, native stateful operations after the operator and Spark Connect are refused with the remedy."""
    write_input(tmp_path / "in", FILES[:1])
    stream, backend = read_input(spark, tmp_path / "in"), make_backend()
    static = spark.createDataFrame([("a", 1.0)], INPUT)
    with backend.install(spark):
        with pytest.raises(InvalidInputError, match=r"not a stream: read it with spark.readStream, .*uninstall\(\)"):
            static.groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")
        result = stream.groupBy("k").transformWithState(Totals(), OUTPUT, "Update", "None")
    with pytest.raises(AttributeError, match=r"dropDuplicates.* remember seen rows in a value state"):
        result.dropDuplicates(["k"])
    with pytest.raises(AttributeError, match=r"before the operator, and name .* with eventTimeColumnName"):
        result.withWatermark("n", "1 minute")
    with pytest.raises(AttributeError, match="SQL cannot read the result: use selectExpr"):
        result.createOrReplaceTempView("totals")
    with pytest.raises(AttributeError, match="only has transformWithState"):
        result.groupBy("k").agg(F.sum("n"))
    with pytest.raises(InvalidInputError, match="union streams before the operator"):
        stream.union(result)
    with pytest.raises(InvalidInputError, match="would be a stateful operation"):
        result.join(stream, "k")
    with pytest.raises(InvalidInputError, match=r"found by their names.* Join on the name, such as on='k'"):
        result.join(static, result.k == static.k)
    with pytest.raises(InvalidInputError, match="Spark Connect is not supported: start the driver with spark-submit"):
        backend.install(object())  # type: ignore[arg-type]  # any session but a classic one


def test_explain_describes_operators_and_state(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output has job, storage, operators, keys, parallelism and states, then Spark's plan of the input."""
    write_input(tmp_path / "in", FILES[:1])
    stream, backend = read_input(spark, tmp_path / "in"), make_backend(max_parallelism=64)
    first = backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None", parallelism=3)
    between = first.selectExpr("cast(n as string) as k", "s as v").filter("v > 0")
    second = backend.transform_with_state_in_pandas(between.groupBy("k"), PandasTotals(), OUTPUT, "Update", "None")

    second.explain()

    lines = capsys.readouterr().out.splitlines()
    assert lines[: lines.index("== Physical Plan ==")] == [
        "== Stateful Operators ==",
        f"Job job in file://{tmp_path / 'store'}, 64 key groups",
        "+- StatefulOperator PandasTotals (2)",
        f"   Processor: {PandasTotals.__module__}.PandasTotals, pandas API",
        "   Key: [k: string]",
        "   Parallelism: 2 partitions of about 32 key groups",
        "   State totals (value): struct<n:bigint,s:double>",
        "   Output: [k: string, n: bigint, s: double]",
        "   +- 2 stateless steps",
        "      +- StatefulOperator Totals (1)",
        f"         Processor: {Totals.__module__}.Totals, Row API",
        "         Key: [k: string]",
        "         Parallelism: 3 partitions of about 21 key groups",
        "         State totals (value): struct<n:bigint,s:double>",
        "         Output: [k: string, n: bigint, s: double]",
        "         +- Input [k: string, v: double]",
    ]
