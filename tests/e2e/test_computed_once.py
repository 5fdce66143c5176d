"""Output and state of one batch are of one attempt, even if Spark loses kept output (I18)."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StructType

from backend_client import ChangelogStateBackend
from backend_client.spark.batch import Receipt
from backend_client.spark.driver.kept_output import KeptOutput
from backend_client.spark.driver.receipts import checked
from backend_client.spark.task.task import MARKER_COLUMN
from backend_client.state.codec import ValueCodec
from tests.e2e.support import random_input, read_input, run_to_end, stored_state, write_input
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

Backends = Callable[..., ChangelogStateBackend]
FILES = random_input(seed=50, batches=3, rows=60, keys=12)


class Dice(StatefulProcessor):
    """Stores and yields a random number that no second attempt would repeat."""

    def init(self, handle: Any) -> None:
        self.number = handle.getValueState("number", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        number = random.SystemRandom().randrange(1 << 60)
        self.number.update((number,))
        yield Row(k=key[0], n=number)

    def close(self) -> None:
        pass


class Largest(StatefulProcessor):
    """Yields the largest number of a key in a batch."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=max(row.n for row in rows))

    def close(self) -> None:
        pass


def lose_blocks(spark: SparkSession) -> None:
    """Drop every block that Spark keeps, as if its executor were lost."""
    for rdd in spark.sparkContext._jsc.getPersistentRDDs().values():
        rdd.unpersist(True)


def dice(backend: ChangelogStateBackend, spark: SparkSession, folder: Path, operators: int = 1) -> Any:
    result: Any = read_input(spark, folder)
    for number in range(operators):
        result = backend.transform_with_state(
            result.groupBy("k"), Dice(), "k string, n long", "Update", "None", name=f"dice-{number}"
        )
    return result


def stored_numbers(backend: ChangelogStateBackend, operator: str) -> list[int]:
    codec = ValueCodec(StructType().add("n", LongType()).json(), "number")
    return sorted(codec.decode(v)[0] for v in stored_state(backend.settings.storage, "job", operator).values())


def test_lost_block_repeats_the_batch(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """I18: a block lost between two actions makes the batch run again; both actions then agree with the state."""
    write_input(tmp_path / "in", FILES)
    backend = make_backend()
    seen: dict[int, tuple[dict[Any, int], dict[Any, int]]] = {}
    lost: list[int] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        first = {row.k: row.n for row in batch.collect()}
        if batch_id == 1 and not lost:
            lost.append(batch_id)
            lose_blocks(spark)
        second = {row.k: row.n for row in batch.filter("n is not null").orderBy("k").collect()}
        seen[batch_id] = (first, second)

    run_to_end(dice(backend, spark, tmp_path / "in").writeStream, tmp_path / "chk", function)

    assert [progress.tries for progress in backend.recent_progress] == [1, 2, 1]
    assert all(first == second for first, second in seen.values())
    last: dict[Any, int] = {}
    for first, _ in seen.values():
        last.update(first)
    assert stored_numbers(backend, "dice-0") == sorted(last.values())


def test_loss_counts_if_its_error_is_caught(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """I18: a function that catches the error of lost output is called again; a loss after its reads has no effect."""
    write_input(tmp_path / "in", FILES)
    backend, seen, caught = make_backend(), {}, []

    def function(batch: DataFrame, batch_id: int) -> None:
        is_first = batch_id not in seen
        reads_later = batch_id == 1 and is_first
        seen[batch_id] = {} if reads_later else {row.k: row.n for row in batch.collect()}
        if is_first and batch_id:
            lose_blocks(spark)
        if reads_later:
            try:
                seen[batch_id] = {row.k: row.n for row in batch.collect()}
            except (PySparkException, Py4JJavaError) as error:
                caught.append(error)

    run_to_end(dice(backend, spark, tmp_path / "in").writeStream, tmp_path / "chk", function)

    assert [progress.tries for progress in backend.recent_progress] == [1, 2, 1]
    assert len(caught) == 1
    last: dict[Any, int] = {}
    for numbers in seen.values():
        last.update(numbers)
    assert stored_numbers(backend, "dice-0") == sorted(last.values())


def test_rows_of_another_attempt_are_refused_after_any_filter(spark: SparkSession) -> None:
    """I18: rows of a second attempt are an error even for a limit or a filter that would drop the markers."""
    receipt = Receipt("dice-0", 0, attempt=7, rows=2, keys=2, changes=2, refs=[])
    rows = [(None, None, "{attempt}"), ("a", 1, None), ("b", 2, None), (None, None, "{attempt} receipt")]

    def rows_of(attempt: int) -> DataFrame:
        data = [(k, n, marker and marker.format(attempt=attempt)) for k, n, marker in rows]
        output = spark.createDataFrame(data, f"k string, n long, {MARKER_COLUMN} string").coalesce(1)
        return checked(output, [receipt])

    assert [tuple(row) for row in rows_of(7).collect()] == [("a", 1), ("b", 2)]
    batch = rows_of(8)
    actions: tuple[Callable[[], list[Row]], ...] = (
        lambda: batch.limit(1).collect(),
        lambda: batch.filter("k is not null and n > 0").collect(),
        lambda: batch.groupBy("k").count().collect(),
        lambda: batch.select("k").collect(),
    )
    for action in actions:
        with pytest.raises(PySparkException, match="DSTL_STALE_OUTPUT of attempt 8"):
            action()


class SlowListener:
    """Delays Spark's record of its jobs: a listener in the same queue that is slow for each task."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda *_: time.sleep(0.3) if name == "onTaskEnd" else None

    def equals(self, other: Any) -> bool:
        return other is self

    def hashCode(self) -> int:
        return 1

    def toString(self) -> str:
        return "slow"

    class Java:  # noqa: D106 - py4j reads it
        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)


def kept_rows(spark: SparkSession, attempt: int) -> KeptOutput:
    """Return one kept row of an attempt."""
    rows = [(None, None, f"{attempt}"), ("a", 1, None), (None, None, f"{attempt} receipt")]
    output = KeptOutput(spark.createDataFrame(rows, f"k string, n long, {MARKER_COLUMN} string").coalesce(1))
    output.frame.count()
    return output


@pytest.mark.parametrize(
    "read",
    [
        lambda batch: batch.collect(),
        lambda batch: batch.groupBy("k").count().collect(),
        lambda batch: batch.join(batch.withColumnRenamed("n", "m"), "k").collect(),
        lambda batch: batch.rdd.map(lambda row: row.k).collect(),
    ],
    ids=["direct", "shuffled", "broadcast", "rdd"],
)
def test_failed_read_counts_for_its_own_batch(spark: SparkSession, read: Callable[[DataFrame], Any]) -> None:
    """I18: another query's failed read does not repeat this query's batch, whose rows are in its sink."""
    well, other = kept_rows(spark, 8), kept_rows(spark, 8)
    read(checked(well.frame, [Receipt("dice-0", 0, attempt=8, rows=1, keys=1, changes=1, refs=[])]))
    with pytest.raises((PySparkException, Py4JJavaError), match="DSTL_STALE_OUTPUT"):
        read(checked(other.frame, [Receipt("dice-0", 0, attempt=7, rows=1, keys=1, changes=1, refs=[])]))

    assert [*other.failed_reads()]
    assert [*well.failed_reads()] == []
    for output in (well, other):
        output.release()


def test_late_record_hides_no_failed_read(spark: SparkSession) -> None:
    """I18: rows of another attempt are noticed even if Spark records the failed read late, and no block is lost."""
    receipt = Receipt("dice-0", 0, attempt=7, rows=1, keys=1, changes=1, refs=[])
    bus, slow = spark.sparkContext._jsc.sc().listenerBus(), SlowListener()
    ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]  # has no types
    bus.addToStatusQueue(slow)
    try:
        output = kept_rows(spark, 8)
        with pytest.raises(PySparkException, match="DSTL_STALE_OUTPUT"):
            checked(output.frame, [receipt]).collect()
        assert [*output.failed_reads()]
        output.release()
    finally:
        bus.removeListener(slow)


def test_clearing_the_cache_costs_nothing(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I18: Spark's cache is the user's: after clearing it, between reads or operators, the same rows are read."""
    from backend_client.spark.driver import passes
    from backend_client.spark.driver.receipts import collect_receipts

    write_input(tmp_path / "in", FILES[:2])
    backend = make_backend(batch_tries_max=1)
    seen: list[tuple[dict[Any, int], dict[Any, int]]] = []

    def clear() -> None:  # the first batch's in one way, the second's in the other
        spark.sql("CLEAR CACHE") if seen else spark.catalog.clearCache()

    def collect_and_clear(output: DataFrame, info: Any) -> Any:
        receipts = collect_receipts(output, info)
        clear()
        return receipts

    def function(batch: DataFrame, _: int) -> None:
        first = {row.k: row.n for row in batch.collect()}
        clear()
        seen.append((first, {row.k: row.n for row in batch.collect()}))

    monkeypatch.setattr(passes, "collect_receipts", collect_and_clear)
    run_to_end(dice(backend, spark, tmp_path / "in", operators=2).writeStream, tmp_path / "chk", function)

    assert [progress.tries for progress in backend.recent_progress] == [1, 1]
    assert len(seen) == 2
    assert all(first == second for first, second in seen)
    last = {key: number for first, _ in seen for key, number in first.items()}
    assert stored_numbers(backend, "dice-1") == sorted(last.values())
    wait_until(  # a query frees them after its end
        lambda: not spark.sparkContext._jsc.getPersistentRDDs(), what="the removal of the query's kept output"
    )


def test_lost_block_between_operators(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I18: if a block of the first operator is lost before the second has read it, the batch runs again."""
    from backend_client.spark.driver import passes
    from backend_client.spark.driver.receipts import collect_receipts

    write_input(tmp_path / "in", FILES[:2])
    backend = make_backend()
    lost: list[str] = []

    def collect_and_lose(output: DataFrame, info: Any) -> Any:
        receipts = collect_receipts(output, info)
        if info.name == "dice-0" and len(lost) == 0:
            lost.append(info.name)
            lose_blocks(spark)
        return receipts

    monkeypatch.setattr(passes, "collect_receipts", collect_and_lose)
    run_to_end(
        dice(backend, spark, tmp_path / "in", operators=2).writeStream, tmp_path / "chk", lambda batch, _: batch.count()
    )

    assert [progress.tries for progress in backend.recent_progress] == [2, 1]


@pytest.fixture
def time_type(spark: SparkSession) -> Iterator[None]:
    """Enable the type TIME, which is off by default in older Spark versions."""
    spark.conf.set("spark.sql.timeType.enabled", "true")
    yield
    spark.conf.unset("spark.sql.timeType.enabled")


@pytest.mark.usefixtures("time_type")
def test_current_time_is_the_batch_s(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Before and after an operator, the current time is that of the batch, for all its reads and operators."""
    write_input(tmp_path / "in", FILES[:2])
    times = {
        "current_timestamp()": "timestamp",
        "now()": "timestamp",
        "localtimestamp()": "timestamp_ntz",
        "current_date()": "date",
        "unix_timestamp()": "long",
        "current_time()": "string",
        "current_time(1)": "string",
    }
    seen: list[tuple[Any, Any]] = []
    result = dice(make_backend(), spark, tmp_path / "in")
    result = result.selectExpr("k", "unix_micros(current_timestamp()) as n").filter("current_timestamp() <= now()")
    result = result.groupBy("k").transformWithState(Largest(), "k string, n long", "Update", "None")
    result = result.select("n", *(F.expr(f"cast({text} as {kind})") for text, kind in times.items()))

    def function(batch: DataFrame, _: int) -> None:
        seen.append((sorted(map(tuple, batch.collect())), sorted(map(tuple, batch.distinct().collect()))))

    run_to_end(result.writeStream, tmp_path / "chk", function)

    for batch_id, (first, second) in enumerate(seen):
        entry = (tmp_path / "chk" / "offsets" / str(batch_id)).read_text(encoding="utf-8")
        timestamp_ms = json.loads(entry.splitlines()[1])["batchTimestampMs"]
        literal = f"timestamp_millis({timestamp_ms})"
        row = spark.range(1).selectExpr(
            f"unix_micros({literal}) as n",
            literal,
            f"{literal} as now",
            f"cast({literal} as timestamp_ntz)",
            f"cast({literal} as date)",
            f"unix_seconds({literal})",
            f"cast(make_time(hour({literal}), minute({literal}), extract(second from {literal})) as string)",
            f"cast(cast(substr(cast({literal} as string), 12, 10) as time(1)) as string)",
        )
        assert second == [tuple(row.collect()[0])]
        assert set(first) == set(second)


class PeakMemory(StatefulProcessor):
    """Reads all rows of a key and yields the worker's peak memory."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        import resource

        n = sum(1 for row in rows if row.pad)
        self.count.update((n,))
        yield Row(n=n, peak_kb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def close(self) -> None:
        pass


def test_partition_larger_than_worker(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """A partition of 800 MB, half of it one key, passes through a worker that stays below 400 MB."""
    rows = 200_000
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).load()
    stream = stream.selectExpr(
        "if(value % 2 = 0, 0, value % 5) as k", "concat(repeat(md5(cast(value as string)), 128)) as pad"
    )
    seen: dict[int, list[Row]] = {}
    backend = make_backend(parallelism=1)
    result = backend.transform_with_state(stream.groupBy("k"), PeakMemory(), "n long, peak_kb long", "Update", "None")

    def function(batch: DataFrame, batch_id: int) -> None:
        seen[batch_id] = batch.collect()

    writer = result.writeStream.option("checkpointLocation", str(tmp_path / "chk")).foreachBatch(function)
    query = writer.trigger(once=True).start()
    query.awaitTermination()

    assert sum(row.n for row in seen[0]) == rows
    assert max(row.n for row in seen[0]) >= rows // 2
    assert max(row.peak_kb for row in seen[0]) < 400 * 1024
