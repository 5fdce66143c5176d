"""
Time modes, timers, watermarks and TTL, on Spark's own operator and on this backend: the same programs and rows.

Spark runs a batch without data whenever the watermark moved; here its timers fire at the front of the next batch. So
outputs are compared over all batches, and streams are driven file by file, as rows come that do not pour in.

A failure means that a program behaves differently here than on Spark.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend
from storage.errors import InvalidInputError
from tests.e2e.test_states import PROVIDER
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

INPUT = "k string, t timestamp, script string"
OUTPUT = "k string, t timestamp, result string"
START_S = 1_700_000_000


class Scripted(StatefulProcessor):
    """Does with timers what each row says, and what it has been told to do when one expires; reports all it sees."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.plan = handle.getValueState("plan", "steps string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            script = json.loads(row.script)
            self._perform(script["do"])
            if "plan" in script:
                self.plan.update((json.dumps(script["plan"]),))
            yield self._seen(key, row.t, "row", timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        expired_ms = expiredTimerInfo.getExpiryTimeInMs()
        moment = datetime.fromtimestamp(expired_ms / 1000, UTC)
        yield self._seen(key, moment, f"expired {key.k}", timerValues)
        plan = self.plan.get()
        if plan is not None:
            self.plan.clear()
            self._perform(json.loads(plan[0]))
            yield self._seen(key, moment, "planned", timerValues)

    def close(self) -> None:
        pass

    def _perform(self, steps: list[list[Any]]) -> None:
        for verb, moment_ms in steps:
            {"set": self.handle.registerTimer, "delete": self.handle.deleteTimer}[verb](moment_ms)

    def _seen(self, key: Any, moment: datetime, what: str, values: Any) -> Row:
        assert values.getCurrentProcessingTimeInMs() > START_S * 1000
        result = [what, values.getCurrentWatermarkInMs(), sorted(self.handle.listTimers())]
        return Row(k=key[0], t=moment, result=json.dumps(result))


class Feed:
    """A folder that files are put into one by one."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._folder = folder
        self._number = 0
        folder.mkdir()

    def stream(self, schema: str = INPUT) -> DataFrame:
        return self._spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(self._folder))

    def put(self, rows: list[dict[str, Any]]) -> None:
        hidden, path = self._folder / f".{self._number}", self._folder / f"{self._number:05d}.json"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.utime(hidden, (START_S + self._number, START_S + self._number))
        hidden.rename(path)
        self._number += 1


class Seen:
    """Keeps all rows of all batches; a batch that is executed again counts once."""

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
        self.run = 0

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self._batches[self.run, batch_id] = [tuple(row) for row in batch.collect()]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return sorted((row for rows in self._batches.values() for row in rows), key=repr)


@pytest.fixture
def spark_rocksdb(spark: SparkSession) -> Iterator[SparkSession]:
    """Let Spark's own operators use its RocksDB store."""
    before = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", PROVIDER)
    yield spark
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", str(before))


def drive(
    result: Any, location: Path, seen: Seen, feeds: list[tuple[Feed, list[dict[str, Any]]]], mode: str = "update"
) -> None:
    """Run a query over files, each of which is worked off before the next is put there."""
    writer = result.writeStream.outputMode(mode).option("checkpointLocation", str(location)).foreachBatch(seen)
    query = writer.start()
    try:
        for feed, rows in feeds:
            feed.put(rows)
            query.processAllAvailable()
    finally:
        query.stop()


def forget_last_commit(location: Path) -> None:
    """Leave a query as if it had died before Spark's commit: the batch is there, and Spark executes it again."""
    last = max(int(path.name) for path in (location / "commits").iterdir() if path.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (location / "commits" / name).unlink()


def row(
    key: str, second: int, do: list[list[Any]] | None = None, plan: list[list[Any]] | None = None
) -> dict[str, Any]:
    script: dict[str, Any] = {"do": do or []}
    if plan is not None:
        script["plan"] = plan
    moment = datetime.fromtimestamp(START_S + second, UTC).isoformat()
    return {"k": key, "t": moment, "script": json.dumps(script)}


def at(second: int) -> int:
    return (START_S + second) * 1000


def scripted_files(seed: int, files: int) -> list[list[dict[str, Any]]]:
    """Return rows with timers before and behind the watermark, some rows late, one row per key and file."""
    chance = random.Random(seed)
    result = []
    for number in range(files):
        now = 10 * number
        rows = []
        for name in chance.sample("abcdef", chance.randrange(1, 4)):
            steps = [
                [chance.choice(["set", "set", "set", "delete"]), at(now + chance.choice([-40, -5, 0, 5, 10, 20]))]
                for _ in range(chance.randrange(4))
            ]
            plan = [["set", at(now + chance.choice([-30, 10, 30]))], ["delete", at(now + chance.choice([5, 10]))]]
            rows.append(row(name, now - chance.choice([0, 0, 3, 60]), steps, plan if chance.random() < 0.5 else None))
        result.append([*rows, row("clock", now)])
    return result


def test_event_time_timers_fire_as_on_spark(
    spark_rocksdb: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """I14: timers, watermark of two inputs and late rows are Spark's, over a restart with another parallelism."""
    spark = spark_rocksdb
    files = [*scripted_files(seed=5, files=5), [row("clock", 40)]]
    rows_seen = {}
    for name in ("theirs", "ours"):
        seen, progress = Seen(), []
        slow, quick = Feed(spark, tmp_path / f"{name}-slow"), Feed(spark, tmp_path / f"{name}-quick")
        for part, numbers in enumerate((range(3), range(3, len(files)))):
            source = slow.stream().withWatermark("t", "7 seconds")
            grouped = source.union(quick.stream().withWatermark("t", "2 seconds")).groupBy("k")
            if name == "theirs":
                result: Any = grouped.transformWithState(Scripted(), OUTPUT, "Update", "EventTime")
            else:
                backend = make_backend(parallelism=2 + part, on_progress=progress.append)
                result = backend.transform_with_state(grouped, Scripted(), OUTPUT, "Update", "EventTime")
            feeds = []
            for number in numbers:
                if number % 2 == 0:
                    feeds.append((quick, [row("clock", 10 * number + 10)]))
                feeds.append((slow, files[number]))
            seen.run = part
            drive(result, tmp_path / f"{name}-checkpoint", seen, feeds)
        rows_seen[name] = seen.rows

    assert rows_seen["ours"] == rows_seen["theirs"]
    assert sum("expired" in line[2] for line in rows_seen["ours"]) > 5
    assert sum(batch.late_rows for batch in progress) > 0


class Closing(StatefulProcessor):
    """Adds up what comes for a key until a timer closes it, and puts out the sum with the time of that timer."""

    def __init__(self, after_s: int) -> None:
        self.after_s = after_s

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.sum = handle.getValueState("sum", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.sum.update(((self.sum.get() or (0,))[0] + row.n,))
            self.handle.registerTimer(int(row.t.timestamp() * 1000) + self.after_s * 1000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        moment = datetime.fromtimestamp(expiredTimerInfo.getExpiryTimeInMs() / 1000, UTC)
        yield Row(k=key[0], t=moment, n=(self.sum.get() or (0,))[0])
        self.sum.clear()

    def close(self) -> None:
        pass


def test_operators_in_a_chain_close_as_on_spark(
    spark_rocksdb: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """
    What the first operator's timers put out is not late for the second, and comes before that one's timers fire.

    The restart finds a batch here whose checkpoint exists and whose commit is missing: it is skipped, and the watermark
    goes on from its rows all the same.
    """
    spark, chance = spark_rocksdb, random.Random(11)
    files = []
    for number in range(6):
        moments = [datetime.fromtimestamp(START_S + 4 * number + second, UTC).isoformat() for second in range(3)]
        files.append([{"k": chance.choice("abcd"), "t": moment, "n": number} for moment in moments])
    end = datetime.fromtimestamp(START_S + 60, UTC).isoformat()
    # The last ones bring the watermark past all timers: what closes then, and what closes by that.
    files += [[{"k": "end", "t": end, "n": 0}]] * 3
    output = "k string, t timestamp, n long"
    progress: list[Any] = []

    def chained(grouped: Any, transform: Callable[..., Any], names: list[dict[str, str]]) -> Any:
        first = transform(grouped, Closing(3), output, "Append", "EventTime", eventTimeColumnName="t", **names[0])
        regrouped = first.withColumn("k", F.expr("if(k in ('a', 'b'), 'ab', k)")).groupBy("k")
        return transform(regrouped, Closing(5), output, "Append", "EventTime", **names[1])

    rows_seen = {}
    for name in ("theirs", "ours"):
        seen, feed, location = Seen(), Feed(spark, tmp_path / name), tmp_path / f"{name}-checkpoint"
        for seen.run, part in enumerate((files[:4], files[4:])):
            grouped = feed.stream(output).withWatermark("t", "2 seconds").groupBy("k")
            if name == "theirs":
                result = chained(grouped, lambda on, *args, **more: on.transformWithState(*args, **more), [{}, {}])
            else:
                backend = make_backend(on_progress=progress.append)
                result = chained(grouped, backend.transform_with_state, [{"name": "first"}, {"name": "second"}])
                if seen.run:
                    forget_last_commit(location)
            drive(result, location, seen, [(feed, rows) for rows in part], "append")
        rows_seen[name] = seen.rows

    assert len(rows_seen["theirs"]) > 5
    assert rows_seen["ours"] == rows_seen["theirs"]
    newest = [at(4 * number + 2) for number in range(6)]
    assert [batch.watermark_ms for batch in progress[1:7]] == [moment - 2000 for moment in newest]


class Aging(StatefulProcessor):
    """Writes states that live for a millisecond, or for long, and reports what it still sees; sets timers as well."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.values = [handle.getValueState(f"value{ttl}", "n long", ttl) for ttl in (1, 3_600_000)]
        self.lists = [handle.getListState(f"list{ttl}", "n long", ttl) for ttl in (1, 3_600_000)]
        self.maps = [handle.getMapState(f"map{ttl}", "n long", "m long", ttl) for ttl in (1, 3_600_000)]

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        numbers = [row.n for row in rows]
        before = self._seen()
        for number in numbers:
            for value, elements, entries in zip(self.values, self.lists, self.maps, strict=True):
                value.update((number,))
                elements.appendValue((number,))
                entries.updateValue((number % 2,), (number,))
        for after_ms in (-5, 0, 1, 3_600_000):
            self.handle.registerTimer(now_ms + after_ms)
        assert timerValues.getCurrentWatermarkInMs() == 0
        yield Row(k=key[0], result=json.dumps([before, self._seen(), len(list(self.handle.listTimers())) >= 4]))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        due = expiredTimerInfo.getExpiryTimeInMs() <= timerValues.getCurrentProcessingTimeInMs()
        yield Row(k=key.k, result=json.dumps(["expired", due]))

    def _seen(self) -> list[Any]:
        seen = []
        for value, elements, entries in zip(self.values, self.lists, self.maps, strict=True):
            content = sorted([n, m] for (n,), (m,) in entries.iterator())
            numbers = [n for (n,) in elements.get()]
            seen += [value.exists(), value.get() and list(value.get()), numbers, content, entries.containsKey((0,))]
        return seen

    def close(self) -> None:
        pass


def test_values_end_and_timers_fire_by_processing_time_as_on_spark(
    spark_rocksdb: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """TTL of values, elements and entries, and timers, are Spark's with processing time; each run is one batch."""
    rows_seen = {}
    for name in ("theirs", "ours"):
        seen, feed = Seen(), Feed(spark_rocksdb, tmp_path / name)
        for part in range(3):
            grouped = feed.stream("k string, n long").groupBy("k")
            arguments: Any = (Aging(), "k string, result string", "Update", "ProcessingTime")
            if name == "theirs":
                result: Any = grouped.transformWithState(*arguments)
            else:
                result = make_backend(parallelism=2 + part % 2).transform_with_state(grouped, *arguments)
            feed.put([{"k": key, "n": 2 * part + add} for key in "ab" for add in range(2)])
            writer = result.writeStream.outputMode("update").trigger(once=True).foreachBatch(seen)
            seen.run = part
            query = writer.option("checkpointLocation", str(tmp_path / f"{name}-checkpoint")).start()
            query.awaitTermination()
        rows_seen[name] = seen.rows

    assert rows_seen["ours"] == rows_seen["theirs"]
    # Each run of each key: its own row and the two timers that are due at once; then those a millisecond later.
    assert len(rows_seen["ours"]) == 2 * 3 * 3 + 2 * 2


def test_timers_fire_without_rows_where_asked_for(
    spark: SparkSession, make_backend: Callable[..., ChangelogStateBackend], tmp_path: Path
) -> None:
    """With `idle_timers`, what is due fires although no row comes; a query cannot be changed to it or from it."""
    seen, feed, location = Seen(), Feed(spark, tmp_path / "input"), tmp_path / "checkpoint"

    def start(**options: Any) -> Any:
        grouped = feed.stream().withWatermark("t", "1 second").groupBy("k")
        result = make_backend(**options).transform_with_state(grouped, Scripted(), OUTPUT, "Update", "EventTime")
        writer = result.writeStream.option("checkpointLocation", str(location)).foreachBatch(seen)
        return writer.start()

    query = start(idle_timers=0.5)
    try:
        feed.put([row("a", 10, [["set", at(5)], ["set", at(9)], ["set", at(11)]])])
        wait_until(lambda: query.exception() or len(seen.rows) >= 3, 120, "the timers")
    finally:
        query.stop()
    assert [json.loads(line[2])[:2] for line in seen.rows if "expired" in line[2]] == [["expired a", at(9)]] * 2
    with pytest.raises(InvalidInputError, match="was started with the option idle_timers"):
        start()
