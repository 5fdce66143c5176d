"""
Timers due by the last rows: they fire at the end of the rows' batch, as Spark fires them in a batch without data.

Whole histories are compared with Spark's own operator in `differential`. A failure means that the last sessions of a
daily run are emitted a day late, twice, or by a watermark that is not Spark's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from backend_client.columnar import Aggregate, Count, Deduplicate, tumbling
from backend_client.service.job_session import JobSession
from dstl_service.cli import main
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.errors import ConflictError
from storage.open import open_store
from tests.e2e.busy_stream import BATCHES, run_both, waits
from tests.e2e.differential.history import SCHEMA, START_S, Event, Feed, History, Run
from tests.e2e.support import Collected, run_to_end

pytestmark = pytest.mark.spark

Backends = Callable[..., ChangelogStateBackend]


class Waiting(StatefulProcessor):
    """Keeps the seconds of its rows, in a list, until a timer of that second; then reports what is left."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seconds = handle.getListState("seconds", "second long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            second = int(row.t.timestamp()) - START_S
            self.seconds.appendValue((second,))
            self.handle.registerTimer((START_S + second) * 1000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        second = expiredTimerInfo.getExpiryTimeInMs() // 1000 - START_S
        # Elements appended in the second pass must not replace those that the first one has appended.
        self.seconds.appendValue((-second,))
        yield Row(k=key[0], second=second, seconds=sorted(second for (second,) in self.seconds.get()))

    def close(self) -> None:
        pass


class Input:
    """Files, one per batch, with the seconds of one key's rows."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._feed = Feed(folder / "input")

    def put(self, *seconds: int) -> None:
        """Add a file."""
        rows = tuple(Event("a", 0, "x", 0, second) for second in seconds)
        contents = History((Run((rows,), 1),)).files(0)[0]
        self._feed.put("".join(line for line in contents[0].splitlines(keepends=True) if '"clock"' not in line))

    def stream(self, delay: str = "1 second") -> DataFrame:
        """Return the stream of rows."""
        stream = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self._feed.folder))
        return stream.withWatermark("t", delay)


@pytest.fixture
def rows(spark: SparkSession, tmp_path: Path) -> Input:
    """Return an input without files yet."""
    return Input(spark, tmp_path)


def waiting(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
    """Return a result that emits each second at its time."""
    output = "k string, second long, seconds array<long>"
    return backend.transform_with_state(stream.groupBy("k"), Waiting(), output, "Append", "EventTime")


def watermarks(location: Path) -> list[int]:
    """Return the watermarks with which Spark began its batches, in seconds after the start; the first one has none."""
    entries = sorted((int(path.name), path) for path in (location / "offsets").glob("[0-9]*"))
    found = [json.loads(path.read_text(encoding="utf-8").splitlines()[1])["batchWatermarkMs"] for _, path in entries]
    return [moment // 1000 - START_S for moment in found[1:]]


def closed(backend: ChangelogStateBackend) -> list[int]:
    """Return the watermarks at which the batches were closed, in seconds after the start."""
    jobs = JobStore(open_store(backend.settings.storage), "job", SystemClock(), SystemIds())
    return [(manifest.closed_ms or 0) // 1000 - START_S for manifest in jobs.completed()]


def test_last_timers_fire(make_backend: Backends, rows: Input, tmp_path: Path) -> None:
    """
    A run to the end of its input fires all timers due by its last rows, each once, even if tables are lost.

    The next run's state is the result of both passes, and every batch is closed at the watermark that Spark then gives
    to the next one.
    """
    backend, location, seen = make_backend(), tmp_path / "chk", Collected()
    rows.put(5, 8, 11)
    run_to_end(waiting(backend, rows.stream()).writeStream, location, seen)
    assert seen.batches == {0: [("a", 5, [-5, 5, 8, 11]), ("a", 8, [-8, -5, 5, 8, 11])]}

    shutil.rmtree(Path(backend.settings.host_folder) / "tables")
    rows.put(13)
    rows.put(9, 13)  # the first row is late
    rows.put(20)
    run_to_end(waiting(make_backend(parallelism=1), rows.stream()).writeStream, location, seen)

    left = [-11, -8, -5, 5, 8, 11]
    assert {batch: out for batch, out in seen.batches.items() if batch} == {
        1: [("a", 11, [*left, 13])],
        2: [],
        3: [("a", 13, [-13, *left, 13, 13, 20])],
    }
    assert closed(backend)[:-1] == watermarks(location) == [10, 12, 12]


def test_nothing_due_costs_nothing(
    make_backend: Backends, rows: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the watermark passes no timer, there is no second pass."""
    passes: list[Any] = []
    monkeypatch.setattr("backend_client.spark.driver.passes.Passes.second", lambda *given: passes.append(given))
    backend = make_backend()
    rows.put(5)
    rows.put(5)
    run_to_end(waiting(backend, rows.stream()).writeStream, tmp_path / "chk", Collected())

    assert passes == []
    assert closed(backend) == [4, 4]


def test_watermark_of_two_inputs(make_backend: Backends, rows: Input, tmp_path: Path) -> None:
    """With several inputs and delays, batches are closed at Spark's own watermark, batch by batch."""
    backend, location = make_backend(), tmp_path / "chk"
    both = rows.stream("7 seconds").where("op = 0").union(rows.stream("2 seconds").where("op = 0"))
    for seconds in ((5, 30), (31,), (60, 2), (55,)):
        rows.put(*seconds)
    run_to_end(waiting(backend, both).writeStream, location, Collected())

    assert closed(backend)[:-1] == watermarks(location) == [23, 24, 53]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_batch_that_is_executed_again_is_closed_as_before(
    spark: SparkSession,
    make_backend: Backends,
    rows: Input,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_shuffled: bool,
) -> None:
    """
    I14: a driver dies between Spark's file sink and the checkpoint, and the next one's batch emits the same.

    Spark does not know any more that the second input is ahead: the timers would fire in a later batch, and the sink
    would get their output twice. A shuffled input is executed adaptively, in stages that hide its watermarks.
    """
    (tmp_path / "other").mkdir()
    other, complete = Input(spark, tmp_path / "other"), JobSession.complete

    def run() -> None:
        both = rows.stream().union(other.stream())
        result = waiting(make_backend(), both.repartition(2) if is_shuffled else both).select("second").writeStream
        query = result.trigger(availableNow=True).start(str(tmp_path / "out"), checkpointLocation=str(tmp_path / "chk"))
        query.awaitTermination()

    def failing(self: JobSession, checkpoint_id: int, plan: Any) -> Any:
        if checkpoint_id:
            raise ConflictError("the driver dies")
        return complete(self, checkpoint_id, plan)

    rows.put(5)
    other.put(100)
    rows.put(20)
    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "complete", failing)
        with pytest.raises(Exception, match="the driver dies"):
            run()
    run()
    rows.put(50)
    other.put(101)
    run()

    assert sorted(row.second for row in spark.read.parquet(str(tmp_path / "out")).collect()) == [5, 20]


def test_delay_that_is_changed_while_a_batch_waits_for_its_checkpoint(
    spark: SparkSession, make_backend: Backends, rows: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: what the shorter delay makes due is emitted by the next batch; Spark's sink leaves out a repetition."""

    def run(delay: str) -> None:
        result = waiting(make_backend(), rows.stream(delay)).select("second").writeStream.trigger(availableNow=True)
        result.start(str(tmp_path / "out"), checkpointLocation=str(tmp_path / "chk")).awaitTermination()

    def failing(*_: Any) -> Any:
        raise ConflictError("the driver dies")

    rows.put(5, 18, 20)
    with monkeypatch.context() as patch:
        patch.setattr(JobSession, "complete", failing)
        with pytest.raises(Exception, match="the driver dies"):
            run("10 seconds")
    run("1 second")
    rows.put(50)
    run("1 second")

    assert sorted(row.second for row in spark.read.parquet(str(tmp_path / "out")).collect()) == [5, 18, 20]


def test_last_timers_after_a_spark_operator_that_needs_no_empty_batch(
    make_backend: Backends, rows: Input, tmp_path: Path
) -> None:
    """
    If Spark's own operators request no batch without data, the last timers have no batch to fire in.

    Rows of the next batch are late by the watermark at which this one was closed, as after such a batch.
    """
    backend, location, seen = make_backend(), tmp_path / "chk", Collected()
    rows.put(5, 8, 11)
    rows.put(10, 11, 20)
    run_to_end(waiting(backend, rows.stream().limit(100)).writeStream, location, seen)

    fired = {batch: [(second, left) for _, second, left in out] for batch, out in seen.batches.items()}
    left = [-8, -5, 5, 8, 11]
    assert fired == {0: [(5, [-5, 5, 8, 11]), (8, left)], 1: [(11, [-11, *left, 11, 20])]}
    assert closed(backend) == [10, 19]
    assert watermarks(location) == [10]


def test_spark_goes_on_at_the_watermark_of_a_batch_that_it_was_set_back_to(
    make_backend: Backends, rows: Input, tmp_path: Path
) -> None:
    """If Spark has deleted its entries of that batch, the next batch has the watermark at which that one was closed."""
    backend, location, seen = make_backend(), tmp_path / "chk", Collected()
    storage = ("--storage", backend.settings.storage)
    rows.put(5, 8, 11)
    run_to_end(waiting(backend, rows.stream()).writeStream, location, seen)
    assert main(["savepoints", *storage, "--create", "first", "job"]) == 0
    rows.put(20)
    run_to_end(waiting(backend, rows.stream()).writeStream, location, seen)
    for folder in ("offsets", "commits"):
        (location / folder / "0").unlink()
        (location / folder / ".0.crc").unlink(missing_ok=True)
    assert main(["rewind", *storage, "--savepoint", "first", "--write", "job"]) == 0
    seen.batches.clear()
    rows.put(9)  # late; the file source puts it in one batch with the previous one
    run_to_end(waiting(backend, rows.stream()).writeStream, location, seen)

    commit = (location / "commits" / "0").read_text(encoding="utf-8")
    assert json.loads(commit.splitlines()[1]) == {"nextBatchWatermarkMs": (START_S + 10) * 1000}
    assert watermarks(location) == [10]
    assert seen.batches == {1: [("a", 11, [-11, -8, -5, 5, 8, 11, 20])]}


def their_windows(stream: DataFrame) -> Any:
    """Count deduplicated rows by windows, with Spark's own operators."""
    windows = stream.dropDuplicatesWithinWatermark(["k", "t"]).groupBy("k", F.window("t", "5 seconds"))
    return windows.count().selectExpr("k", "window.start", "count")


def our_windows(backend: ChangelogStateBackend, stream: DataFrame) -> Any:
    """Do the same with columnar operators."""
    first = backend.transform_columns(
        stream.groupBy("k", "t"), Deduplicate("t", timedelta(seconds=1)), outputMode="Append"
    )
    windows = Aggregate(Count(), windows=tumbling("t", timedelta(seconds=5)))
    return backend.transform_columns(first.groupBy("k"), windows, outputMode="Append").drop("window_end")


@pytest.mark.parametrize("what", ["EventTime", "ProcessingTime", "columns"])
def test_spark_is_told_to_run_no_batch_without_data(
    spark: SparkSession, make_backend: Backends, tmp_path: Path, what: str
) -> None:
    """
    If Spark runs no batch without data, each batch emits what Spark's own operators emit in it.

    Due timers wait for the next batch and fire after its rows, which are late by the previous batch's watermark.
    """
    backend, settings = make_backend(), {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}
    program = waits(what)
    their_program, our_program = (
        (their_windows, partial(our_windows, backend)) if what == "columns" else (program, program)
    )

    theirs, ours = run_both(spark, backend, tmp_path, their_program, our_program, settings)

    assert ours.batches == theirs.batches
    assert len(ours.batches) == len(BATCHES)


def test_last_windows_and_repetitions(spark: SparkSession, make_backend: Backends, tmp_path: Path) -> None:
    """Output of columnar windows after a columnar deduplication equals that of Spark's own two operators."""
    rows, location = Input(spark, tmp_path), tmp_path / "chk"
    for seconds in ((1, 3, 3, 9), (9, 12, 17), (17, 30, 31), (33,)):
        rows.put(*seconds)
    theirs, ours = Collected(), Collected()
    run_to_end(their_windows(rows.stream()).writeStream.outputMode("append"), tmp_path / "theirs", theirs)
    run_to_end(our_windows(make_backend(), rows.stream()).writeStream, location, ours)

    def all_of(collected: Collected) -> list[tuple[Any, ...]]:
        return sorted(row for batch in collected.batches.values() for row in batch)

    assert all_of(ours) == all_of(theirs)
    assert len(all_of(ours)) >= 4
