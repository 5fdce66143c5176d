"""
Rate of exactly-once output to Kafka beside Spark's own Kafka sink, which writes at least once.

The same query with both, in turn, on a source that always has more: each row updates the state of its key and yields
one record of about 100 bytes. Counted are the records that a reader with ``read_committed`` can see, between the first
and the last arrival of a window, and the CPU time of all processes: driver, JVM, workers, sidecar and broker.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from loadtest.bench.measuring import new_stream, open_backend, sidecar_pid
from loadtest.bench.processors import TOTALS, Totals
from loadtest.bench.workloads import columns
from tools.reporting.figures import Figure, Goal
from tools.servers.kafka import KafkaBroker

ROWS_GOAL, COLUMNS_GOAL = 0.85, 0.70
_POLL_S = 0.02
_ARRIVAL_TIMEOUT_S = 120.0
_PADDING = 60

Apply = Callable[[DataFrame, ChangelogStateBackend], Any]


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of one run of a query."""

    records_per_s: float
    cpu_s_per_million: float


class Topic:
    """The end of a topic of two partitions, as a reader of committed records sees it."""

    def __init__(self, broker: KafkaBroker, name: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": broker.servers, "group.id": "bench", "isolation.level": "read_committed"}
        )
        self._partitions = [TopicPartition(name, number) for number in (0, 1)]
        admin = AdminClient({"bootstrap.servers": broker.servers})
        admin.create_topics([NewTopic(name, len(self._partitions))])[name].result(30)

    def records(self) -> int:
        """Return the number of records that can be seen, with one more for each transaction."""
        return sum(self._consumer.get_watermark_offsets(item, timeout=10)[1] for item in self._partitions)

    def next_arrival(self) -> tuple[float, int]:
        """Wait for more records; return when they were seen, and how many there are."""
        before, deadline = self.records(), time.monotonic() + _ARRIVAL_TIMEOUT_S
        while (now := self.records()) == before:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no record arrived within {_ARRIVAL_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        return time.monotonic(), now


def measure(spark: SparkSession, broker: KafkaBroker, rounds: int, window_s: float, rows: int) -> list[Figure]:
    """
    Run each query `rounds` times with either sink, in turn.

    Args:
        spark: A session with Spark's Kafka connector.
        broker: The broker.
        rounds: Number of runs with either sink.
        window_s: Least length of a run's window.
        rows: Number of rows in a batch.
    """
    figures: list[Figure] = []
    for name, apply, goal in (("rows", _rows, ROWS_GOAL), ("columns", columns, COLUMNS_GOAL)):
        rates: dict[bool, list[Rate]] = {False: [], True: []}
        for number in range(2 * rounds):
            once = number % 2 == 1
            rates[once].append(_run(spark, broker, f"{name}-{number}", apply, window_s, rows, once=once))
        figures += _figures(name, rates, goal)
    return figures


def _run(
    spark: SparkSession,
    broker: KafkaBroker,
    topic: str,
    apply: Apply,
    window_s: float,
    rows: int,
    *,
    once: bool,
) -> Rate:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place, open_backend(Path(place), 2) as backend:
        result = apply(new_stream(spark, rows, rows), backend)
        padding = F.lit("x" * _PADDING).alias("padding")
        value = F.to_json(F.struct("k", "n", "s", padding)).alias("value")
        writer = result.select(F.col("k").cast("string").alias("key"), value).writeStream.format("kafka")
        writer = writer.option("kafka.bootstrap.servers", broker.servers).option("topic", topic)
        writer = writer.guarantee("exactly-once" if once else "at-least-once")
        end = Topic(broker, topic)
        query = writer.option("checkpointLocation", f"{place}/checkpoint").start()
        try:
            while end.records() < 4 * rows:  # warm
                end.next_arrival()
            began_s, begin = end.next_arrival()
            cpu_s = _cpu_s(broker, backend)
            while True:
                now_s, now = end.next_arrival()
                if now_s - began_s >= window_s:
                    break
            used_s = _cpu_s(broker, backend) - cpu_s
        finally:
            query.stop()
    rate = Rate((now - begin) / (now_s - began_s), used_s / (now - begin) * 1e6)
    kind = "exactly once" if once else "at least once, Spark's sink"
    print(
        f"{topic:12} {kind:30} {rate.records_per_s:10,.0f}/s, CPU {rate.cpu_s_per_million:.2f} s a million", flush=True
    )
    return rate


def _figures(name: str, rates: dict[bool, list[Rate]], goal: float) -> list[Figure]:
    def median(once: bool, field: str) -> float:  # noqa: FBT001 - the key of the runs
        return float(statistics.median(getattr(rate, field) for rate in rates[once]))

    speed, cpu = ({once: median(once, field) for once in rates} for field in ("records_per_s", "cpu_s_per_million"))
    return [
        Figure(f"{name}: records visible, at least once by Spark's sink", speed[False], "1/s"),
        Figure(f"{name}: records visible, exactly once", speed[True], "1/s"),
        Figure(f"{name}: exactly once / at least once", speed[True] / speed[False], "ratio", Goal(">=", goal)),
        Figure(f"{name}: CPU time a million records, at least once", cpu[False], "s"),
        Figure(f"{name}: CPU time a million records, exactly once", cpu[True], "s"),
    ]


def _rows(frame: DataFrame, backend: ChangelogStateBackend) -> Any:
    return backend.transform_with_state(frame.groupBy("k"), Totals(), TOTALS, "Update", "None")


def _cpu_s(broker: KafkaBroker, backend: ChangelogStateBackend) -> float:
    """Return the CPU time so far of this process, its children, the broker and the sidecar."""
    own = psutil.Process()
    processes = {own, *own.children(recursive=True), psutil.Process(broker.pid), psutil.Process(sidecar_pid(backend))}
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
