"""
Latency of exactly-once output to Kafka beside Spark's own Kafka sink, which writes at least once.

A producer stamps records; each passes through a stateful query with a trigger of 500 ms, and a reader with
``read_committed`` compares its stamp with the time at which it sees the record. All three are on one machine and its
clock.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from loadtest.bench.measuring import open_backend
from tools.reporting.figures import Figure, Goal, percentile
from tools.servers.kafka import KafkaBroker

TRIGGER_MS = 500
_RECORDS_PER_S, _KEYS = 200, 100
_WARM_UP_S = 10.0
_STAMPED = "k int, n long, at long"


class Stamps(StatefulProcessor):
    """Counts the records of a key, and passes each on with its stamp."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Count the rows."""
        old = self._count.get()
        number = old[0] if old is not None else 0
        for row in rows:
            number += 1
            yield Row(k=key[0], n=number, at=row.at)
        self._count.update((number,))

    def close(self) -> None:
        """Nothing to close."""


class Latencies(NamedTuple):
    """One run's milliseconds from production to visibility of each record, and the length of each batch."""

    records_ms: list[float]
    batches_ms: list[int]


def measure(spark: SparkSession, broker: KafkaBroker, rounds: int, window_s: float) -> list[Figure]:
    """
    Run the query `rounds` times with either sink, in turn.

    Args:
        spark: A session with Spark's Kafka connector.
        broker: The broker.
        rounds: Number of runs with either sink.
        window_s: Length of a run's window.
    """
    runs: dict[bool, list[Latencies]] = {False: [], True: []}
    for number in range(2 * rounds):
        once = number % 2 == 1
        found = _run(spark, broker, f"latency-{number}", window_s, once=once)
        runs[once].append(found)
        kind = "exactly once" if once else "at least once, Spark's sink"
        p50, p99 = (percentile(found.records_ms, at) or 0.0 for at in (50, 99))
        print(
            f"latency {kind:30} p50 {p50:6,.0f} ms, p99 {p99:6,.0f} ms, {len(found.records_ms):,} records", flush=True
        )
    return _figures(runs)


def _figures(runs: dict[bool, list[Latencies]]) -> list[Figure]:
    """Return the medians of the runs; one batch more than Spark's sink is the goal."""

    def median(percent: float, *, once: bool) -> float:
        return float(statistics.median(percentile(run.records_ms, percent) or 0.0 for run in runs[once]))

    batch_ms = statistics.median(duration for run in runs[True] for duration in run.batches_ms)
    one_batch_ms = max(TRIGGER_MS, batch_ms)
    figures = [Figure("latency: a batch of exactly-once output", batch_ms, "ms")]
    for percent in (50, 99):
        theirs, ours = median(percent, once=False), median(percent, once=True)
        figures += [
            Figure(f"latency: p{percent} by Spark's sink", theirs, "ms"),
            Figure(f"latency: p{percent} exactly once", ours, "ms", Goal("<=", theirs + one_batch_ms)),
        ]
    return figures


def _run(spark: SparkSession, broker: KafkaBroker, name: str, window_s: float, *, once: bool) -> Latencies:
    source, end = f"{name}-in", f"{name}-out"
    admin = AdminClient({"bootstrap.servers": broker.servers})
    for made in admin.create_topics([NewTopic(topic, 2) for topic in (source, end)]).values():
        made.result(30)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, open_backend(Path(place), 2) as backend:
        stream = spark.readStream.format("kafka").option("kafka.bootstrap.servers", broker.servers)
        rows = stream.option("subscribe", source).option("startingOffsets", "earliest").load()
        rows = rows.selectExpr("cast(cast(key as string) as int) as k", "cast(cast(value as string) as long) as at")
        result = backend.transform_with_state(rows.groupBy("k"), Stamps(), _STAMPED, "Update", "None")
        writer = result.select(F.col("k").cast("string").alias("key"), F.col("at").cast("string").alias("value"))
        output = writer.writeStream.format("kafka").option("kafka.bootstrap.servers", broker.servers)
        output = output.option("topic", end).guarantee("exactly-once" if once else "at-least-once")
        output = output.trigger(processingTime=f"{TRIGGER_MS} milliseconds")
        query = output.option("checkpointLocation", f"{place}/checkpoint").start()
        try:
            with _producing(broker, source):
                seen_ms = _seen(broker, end, window_s)
        finally:
            query.stop()
        batches = [progress["durationMs"]["triggerExecution"] for progress in query.recentProgress]
    return Latencies(seen_ms, batches[len(batches) // 2 :])


@contextmanager
def _producing(broker: KafkaBroker, topic: str) -> Iterator[None]:
    """Produce stamped records at a steady rate."""
    ended = threading.Event()

    def produce() -> None:
        producer = Producer({"bootstrap.servers": broker.servers, "linger.ms": 1})
        began, number = time.monotonic(), 0
        while not ended.is_set():
            producer.produce(topic, key=str(number % _KEYS), value=str(time.time_ns()))
            producer.poll(0)
            number += 1
            ended.wait(max(0.0, began + number / _RECORDS_PER_S - time.monotonic()))
        producer.flush()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _seen(broker: KafkaBroker, topic: str, window_s: float) -> list[float]:
    """Return how many milliseconds after its stamp each record of a window is seen; the warm-up is left out."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.servers,
            "group.id": "bench",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 10,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in (0, 1)])
    found: list[float] = []
    begin_s: float | None = None
    deadline = time.monotonic() + _WARM_UP_S + window_s + 120.0
    try:
        while begin_s is None or time.monotonic() < begin_s + _WARM_UP_S + window_s:
            if time.monotonic() > deadline:
                raise TimeoutError("no record arrived")
            message = consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            begin_s = time.monotonic() if begin_s is None else begin_s
            if time.monotonic() >= begin_s + _WARM_UP_S:
                found.append((time.time_ns() - int(message.value() or b"0")) / 1e6)
    finally:
        consumer.close()
    return found
