"""
Rows that Spark combines before they reach Python: the same results and state as if each had come.

A failure means that an aggregation is wrong where a batch has many rows per key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from backend_client import ChangelogStateBackend
from backend_client.columnar import (
    Aggregate,
    Aggregation,
    BatchMoment,
    Count,
    Last,
    Max,
    Mean,
    Min,
    Sum,
    TopK,
    Windows,
    sliding,
    tumbling,
)
from backend_client.key_group_sql import HASH_BITS
from backend_client.spark import combining
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.combining import Combining, combining_of
from backend_client.spark.driver import passes
from backend_client.spark.driver.placement import (
    ORDER_COLUMN,
    finds_combined_in_place,
    key_places,
    place,
    place_combined,
)
from backend_client.spark.places.hosts import PARTITION_COLUMN, Hosts
from backend_client.spark.places.seats import Seats
from backend_client.spark.private.frame_maker import FrameMaker, Steps
from backend_client.spark.query import Operator
from backend_client.spark.task.columnar_calls import ColumnarCalls
from backend_client.spark.task.mixed_keys import KeySeparator, key_encoding, with_key_groups, with_keys
from storage.errors import InternalError, InvalidInputError
from storage.key_groups import key_group_range
from tests.e2e.support import Collected, run_to_end
from tests.unit.backend_client.columnar.columnar_task import Table, Writer

pytestmark = pytest.mark.spark

SCHEMA = (
    "f double, s string, at timestamp, l long, i int, d decimal(12,2), w decimal(38,2), x double, y float, b date, "
    "t timestamp"
)
NAN, INF, LONG = float("nan"), float("inf"), 2**63 - 1
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
PARTITIONS, GROUPS = 2, 16
MANY = 1e6
"""Rows per group."""
NUMBERS = [Count(), Sum("l"), *(kind(name) for kind in (Count, Min, Max, Mean) for name in ("l", "i", "d", "x", "y"))]
ALL = (*NUMBERS, Sum("i"), Sum("d"), Sum("x"), Sum("y"), Min("b"), Max("b"), Min("t"), Max("t"))
WINDOWS = (
    None,
    tumbling("at", 10 * SECOND),
    sliding("at", 12 * SECOND, 4 * SECOND, timedelta(microseconds=1_500_001)),
)


def rows(seed: int, number: int) -> list[tuple[Any, ...]]:
    """Return random rows, with the extremes of their types."""
    random = Random(seed)

    def pick(*values: Any) -> Any:
        return random.choice([None, *values])

    return [
        (
            pick(0.0, -0.0, NAN, 1.5),
            pick("a", "b"),
            pick(*(BEGIN + timedelta(seconds=second, microseconds=1) for second in range(30))),
            pick(LONG, -LONG - 1, LONG - 5, 1, -1, 0),
            pick(-(2**31), 2**31 - 1, 7),
            pick(Decimal("9999999999.99"), Decimal("-0.01")),
            None,
            pick(0.5, 0.25, -3.0, *([INF, NAN] if seed % 2 else [])),
            pick(1.5, -2.5, -INF),
            pick(BEGIN.date(), datetime(1, 1, 1, tzinfo=UTC).date()),
            pick(BEGIN, BEGIN + SECOND),
        )
        for _ in range(number)
    ]


class Way(Enum):
    """How an operator's rows come."""

    SINGLY = "as they are"
    COMBINED = "combined where they were moved"
    COMBINED_APART = "combined in their source partitions, and again where these rows were moved"


class Ways:
    """An operator whose rows come in each way; each way has a table of its own."""

    def __init__(self, frame: DataFrame, processor: Aggregate, keys: tuple[str, ...]) -> None:
        self.plan = ColumnarPlan.of(processor, "Update", frame.schema, keys)
        found = combining_of(self.plan)
        assert found is not None
        self.combining = found
        schema = StructType()
        self.operator = Operator("op", self.plan, keys, frame.schema, schema, self.plan.states(), None, ())
        self.tables = {way: [Table() for _ in range(PARTITIONS)] for way in Way}

    def run(self, frame: DataFrame, watermark_ms: int | None, way: Way) -> list[Any]:
        """Return output and counters of a batch."""
        if way is Way.SINGLY:
            placed, places = place(self.operator, frame, PARTITIONS, GROUPS, None), key_places(self.operator)
        else:
            per_group = MANY if way is Way.COMBINED_APART else 0.0
            placed = place_combined(self.operator, self.combining, frame, PARTITIONS, GROUPS, None, per_group)
            places = (None,) * len(self.operator.key_columns)
        found = placed.frame().select(F.spark_partition_id().alias("partition"), "*").toArrow().combine_chunks()
        counts, output = [0, 0, 0], list[Any]()
        for number, table in enumerate(self.tables[way]):
            own = found.filter(pa.compute.equal(found["partition"], number)).drop_columns("partition")
            calls = self.calls(number, watermark_ms, None if way is Way.SINGLY else self.combining)
            batches = with_keys(own.to_batches(max_chunksize=100), places)
            encode = key_encoding(self.operator.key_schema.json(), self.plan.keys)
            writer = Writer()
            separated = with_key_groups(KeySeparator(batches, len(places), encode))
            # Replace table and log writer.
            outputs: Iterable[pa.RecordBatch] = calls.run(separated, table, writer)  # type: ignore[arg-type]
            output += [row for part in outputs for row in part.to_pylist()]
            writer.apply(table)
            seen = calls.rows_seen, calls.keys_seen, calls.late_rows
            counts = [known + more for known, more in zip(counts, seen, strict=True)]
        return [counts, sorted(map(plain, output))]

    def calls(self, number: int, watermark_ms: int | None, combining: Combining | None) -> ColumnarCalls:
        key_groups, moment = key_group_range(number, PARTITIONS, GROUPS), BatchMoment("update", watermark_ms, 0)
        key_schema = self.operator.key_schema.json()
        return ColumnarCalls(
            self.plan, key_schema, self.plan.states(), key_groups, (moment, moment), 1 << 20, combining
        )


def ms(second: int) -> int:
    """Return the time this many seconds after BEGIN."""
    return round((BEGIN + second * SECOND).timestamp() * 1000)


def plain(row: dict[str, Any]) -> str:
    """Return a row's text, with one zero, and without the digits in which the order of additions shows."""
    return repr({name: f"{value + 0.0:.10g}" if isinstance(value, float) else value for name, value in row.items()})


@pytest.mark.parametrize("windows", WINDOWS, ids=["none", "tumbling", "sliding"])
def test_combined_rows_have_the_same_results(spark: SparkSession, windows: Windows | None) -> None:
    """I14: for each type and its extremes, nulls, equal keys, and late rows: output, state and counts are the same."""
    aggregations = ALL if windows is None else (*NUMBERS, Sum("d"))
    named = [replace(aggregation, name=f"a{at}") for at, aggregation in enumerate(aggregations)]
    frames = [spark.createDataFrame(rows(seed, 400), SCHEMA).withWatermark("at", "1 second") for seed in (1, 2)]
    frames = [frame.withColumn("l", F.expr("l div 1000")) for frame in frames]  # so that sums fit
    ways = Ways(frames[0], Aggregate(*named, windows=windows), ("f", "s"))
    for frame, second in zip(frames, (None, 9), strict=True):
        results = [ways.run(frame, None if second is None else ms(second), way) for way in ways.tables]
        assert results[1:] == results[:1] * 2
        assert results[0][1]


def test_sums_may_leave_their_type_on_the_way(spark: SparkSession) -> None:
    """A pane's sum may exceed a long if no window's does that is not over; else it is an error."""
    found = [(1, BEGIN + second * SECOND, value) for second, value in ((0, LONG), (1, LONG), (5, -LONG))]
    frame = spark.createDataFrame(found, "k int, at timestamp, l long").withWatermark("at", "1 second")
    windows = sliding("at", 10 * SECOND, 5 * SECOND)
    ways = Ways(frame, Aggregate(Count(name="n"), Sum("l", name="s"), windows=windows), ("k",))
    for way in ways.tables:
        with pytest.raises(InvalidInputError, match="a sum exceeds its type"):
            ways.run(frame, None, way)
        counts, output = ways.run(frame, ms(5), way)
        assert counts == [3, 1, 0]
        assert {text.partition("'n'")[2] for text in output} == {f": 3, 's': {LONG}}}", f": 1, 's': {-LONG}}}"}
        assert ways.run(frame, ms(60), way) == [[3, 1, 3], []]


@pytest.mark.parametrize(
    ("keys", "aggregations", "windows"),
    [
        (("s",), (Count(), TopK("l")), None),
        (("s",), (Last("l", by="at"),), None),
        (("s",), (Max("s"),), None),
        (("s",), (Sum("w"),), None),
        (("s",), (Count(),), sliding("at", 5 * SECOND, 2 * SECOND)),
        (("n",), (Count(),), None),
    ],
)
def test_other_rows_are_not_combined(
    spark: SparkSession, keys: tuple[str, ...], aggregations: tuple[Aggregation, ...], windows: Windows | None
) -> None:
    """Values that Spark cannot compute in place, or would compute differently, come row by row."""
    frame = spark.createDataFrame([], f"{SCHEMA}, n array<int>").withWatermark("at", "1 second")
    plan = ColumnarPlan.of(Aggregate(*aggregations, windows=windows), "Update", frame.schema, keys)
    assert combining_of(plan) is None


def test_rows_of_another_partition_are_refused(spark: SparkSession) -> None:
    """If Spark ever moved the combined rows once more, no key would be written into another partition's table."""
    frame = spark.range(100).selectExpr("id as k")
    ways = Ways(frame, Aggregate(Count()), ("k",))
    placed = place_combined(ways.operator, ways.combining, frame, PARTITIONS, GROUPS, None).frame().toArrow()
    separated = with_key_groups(with_keys(placed.to_batches(), (None,)))
    with pytest.raises(InternalError, match="key groups outside"):
        list(ways.calls(0, None, ways.combining).run(separated, Table(), Writer()))  # type: ignore[arg-type]


def test_pinned_rows_are_combined_where_they_are(spark: SparkSession) -> None:
    """On a cluster, rows that are joined to their partitions' anchors are not moved again to be combined."""
    own = spark.newSession()
    own.conf.set("spark.sql.adaptive.enabled", "false")
    frame, hosts = own.range(1000).selectExpr("id % 7 as k", "id as v"), Hosts(own, keeps_copies=False)
    places = Seats(("far",) * PARTITIONS, (None,) * PARTITIONS)
    ways = Ways(frame, Aggregate(Sum("v")), ("k",))
    anchor = hosts.frame_of(range(PARTITIONS), PARTITIONS, places).hint("shuffle_hash")
    placed = place_combined(
        ways.operator, ways.combining, frame, PARTITIONS, GROUPS, lambda rows, _: rows.join(anchor, PARTITION_COLUMN)
    )
    rows = placed.frame().select(F.spark_partition_id(), ORDER_COLUMN).collect()
    assert len(rows) == 7
    assert all(key_group_range(at, PARTITIONS, GROUPS).contains(order >> HASH_BITS) for at, order in rows)


def test_source_partitions_are_aggregated_where_that_leaves_few_rows(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source partition sends one row per key if it has many rows per key; else it sends them as they are."""
    aggregate_apart, sent = FrameMaker.aggregate_apart, list[int]()

    def noted(frames: FrameMaker, *args: Any) -> DataFrame | None:
        rows = aggregate_apart(frames, *args)
        sent.append(-1 if rows is None else rows.count())
        return rows

    monkeypatch.setattr(FrameMaker, "aggregate_apart", noted)
    frame = spark.range(0, 1000, 1, 4).selectExpr("id % 7 as k", "id as v")
    ways = Ways(frame, Aggregate(Sum("v")), ("k",))
    for per_group in (3.9, 4.0):
        placed = place_combined(ways.operator, ways.combining, frame, PARTITIONS, GROUPS, None, per_group)
        assert placed.frame().count() == 7
    assert sent == [4 * 7]


def test_source_partitions_of_any_plan_are_aggregated(spark: SparkSession) -> None:
    """The rows may come from a plan that moves rows itself; aggregates that need sorted rows are left to others."""
    own = spark.newSession()
    own.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
    frame = own.range(100).join(own.range(50, 150).withColumn("v", F.col("id") + 1), "id")
    frames = FrameMaker.of(frame)
    rows = frames.aggregate_apart(frame, ["id % 3 as k"], ["k"], ["count(*) as n", "sum(v) as s"])
    assert rows is not None
    totals = rows.groupBy("k").agg(F.sum("n"), F.sum("s")).collect()
    expected = frame.groupBy(F.expr("id % 3")).agg(F.count("*"), F.sum("v")).collect()
    assert sorted(totals) == sorted(expected)
    assert frames.aggregate_apart(frame, ["id % 3 as k"], ["k"], ["max(string(v)) as m"]) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("spark.sql.requireAllClusterKeysForDistribution", "true"), ("spark.sql.retainGroupColumns", "false")],
)
def test_sessions_that_aggregate_otherwise_combine_none(spark: SparkSession, name: str, value: str) -> None:
    """Where Spark is told to move rows by all columns of a groupBy, or to drop them, rows come as they are."""
    assert finds_combined_in_place(spark)
    spark.conf.set(name, value)
    try:
        assert not finds_combined_in_place(spark)
    finally:
        spark.conf.unset(name)


def test_a_query_combines_from_batch_to_batch(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I14: batches whose rows are combined, and others between them, together have the output of Spark's windows."""
    monkeypatch.setattr(combining, "ROWS_MIN", 50)
    combined: list[int] = []

    def counted(operator: Operator, *args: Any) -> Steps:
        combined.append(len(output.batches))
        return place_combined(operator, *args)

    monkeypatch.setattr(passes, "place_combined", counted)
    folder = tmp_path / "input"
    for number, count in enumerate((200, 200, 10, 200, 200)):  # few rows are not combined
        frame = spark.range(count).selectExpr(
            "cast(pmod(hash(id), 3) as int) k", f"id + {number} v", f"timestamp_seconds({number * 8} + pmod(id, 12)) at"
        )
        frame.coalesce(1).write.mode("append").parquet(str(folder))

    def events() -> DataFrame:
        stream = spark.readStream.schema("k int, v long, at timestamp").option("maxFilesPerTrigger", 1)
        return stream.parquet(str(folder)).withWatermark("at", "3 seconds")

    output, expected = Collected(), Collected()
    windows = sliding("at", 10 * SECOND, 5 * SECOND)
    processor = Aggregate(Count(name="n"), Sum("v", name="s"), windows=windows)
    own = make_backend(parallelism=2).transform_columns(events().groupBy("k"), processor)
    run_to_end(own.writeStream.outputMode("update"), tmp_path / "checkpoint", output)
    grouped = events().groupBy("k", F.window("at", "10 seconds", "5 seconds").alias("w"))
    native = grouped.agg(F.count("*").alias("n"), F.sum("v").alias("s")).select("k", "w.start", "w.end", "n", "s")
    run_to_end(native.writeStream.outputMode("update"), tmp_path / "native", expected)

    assert combined == [1, 2, 4]
    assert {at: found for at, found in output.batches.items() if found} == {
        at: found for at, found in expected.batches.items() if found
    }
