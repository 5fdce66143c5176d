"""
Spark's own ``transformWithState`` and this backend, side by side: the same processor, the same rows, one run.

Each workload streams batches of a fixed size from Spark's rate source through one operator into the noop sink, first
with Spark's operator (Row API, RocksDB state store, changelog checkpointing on), then with this backend, on the same
disk. The first batches warm both up; the median of the following ones counts.

``python -m loadtest.bench_smoke [--only NAME]`` prints a table and writes ``reports/bench-smoke.json``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StreamingQuery

from backend_client import ChangelogStateBackend
from loadtest.report import Figure, Goal, is_strict, strict_exit_code, write_report_json

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
OUTPUT = "k int, n long, s double"
WARM_UP_BATCHES = 3
MEASURED_BATCHES = 5
BATCH_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows and keys of a batch, partitions, and the least ratio of Spark's batch time to this backend's."""

    name: str
    rows: int
    keys: int
    partitions: int
    goal: float


WORKLOADS = (
    Workload("200k rows, 200k keys", 200_000, 200_000, 4, 8.0),
    Workload("200k rows, 20k keys", 200_000, 20_000, 4, 3.0),
    Workload("1k rows, 1k keys", 1_000, 1_000, 4, 1.0),
)


class Totals(StatefulProcessor):
    """Count and sum per key: one get and one update per key and batch."""

    def init(self, handle: Any) -> None:
        """Ask for the state."""
        self.totals = handle.getValueState("totals", "n long, s double")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Add the rows."""
        n, s = 0, 0.0
        for row in rows:
            n, s = n + 1, s + row.v
        old = self.totals.get()
        if old is not None:
            n, s = n + old[0], s + old[1]
        self.totals.update((n, s))
        yield Row(k=key[0], n=n, s=s)

    def close(self) -> None:
        """Nothing to close."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workloads; return the exit code."""
    parser = argparse.ArgumentParser(description="Compare with Spark's own transformWithState.")
    parser.add_argument("--only", help="run the workloads whose name has this text")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="dstl-bench-"))
    spark = new_session(folder)
    figures: list[Figure] = []
    try:
        for number, workload in enumerate(WORKLOADS):
            if options.only is None or options.only in workload.name:
                figures += compare(spark, workload, folder / str(number))
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    write_report_json(Path("reports/bench-smoke.json"), figures)
    return strict_exit_code(figures) if is_strict() else 0


def compare(spark: SparkSession, workload: Workload, folder: Path) -> list[Figure]:
    """Run one workload on both sides and print the line of the table."""
    theirs = run_spark(spark, workload, folder / "spark")
    ours = run_backend(spark, workload, folder / "dstl")
    ratio = statistics.median(theirs) / statistics.median(ours)
    rows_per_s = workload.rows / statistics.median(ours) * 1000
    print(
        f"{workload.name:22}  Spark {statistics.median(theirs):8.0f} ms  DSTL {statistics.median(ours):7.0f} ms  "
        f"{rows_per_s:9.0f} rows/s  ratio {ratio:5.2f}  (goal {workload.goal:.0f})   "
        f"Spark {theirs}  DSTL {ours}",
        flush=True,
    )
    return [
        Figure(f"{workload.name}: Spark, median trigger", statistics.median(theirs), "ms"),
        Figure(f"{workload.name}: DSTL, median trigger", statistics.median(ours), "ms"),
        Figure(f"{workload.name}: Spark / DSTL", ratio, "ratio", Goal(">=", workload.goal)),
    ]


def run_spark(spark: SparkSession, workload: Workload, folder: Path) -> list[int]:
    """Return the trigger times (ms) of the measured batches of Spark's own operator."""
    out = new_stream(spark, workload.rows, workload.keys).groupBy("k")
    result = out.transformWithState(
        statefulProcessor=Totals(), outputStructType=OUTPUT, outputMode="Update", timeMode="None"
    )
    return measure(result.writeStream.outputMode("update"), folder)


def run_backend(spark: SparkSession, workload: Workload, folder: Path) -> list[int]:
    """Return the trigger times (ms) of the measured batches of this backend."""
    with open_backend(folder, workload.partitions) as backend:
        result = backend.transform_with_state(
            new_stream(spark, workload.rows, workload.keys).groupBy("k"),
            statefulProcessor=Totals(),
            outputStructType=OUTPUT,
            outputMode="Update",
            timeMode="None",
        )
        return measure(result.writeStream.outputMode("update"), folder)


@contextmanager
def open_backend(folder: Path, partitions: int) -> Iterator[ChangelogStateBackend]:
    """Give a backend with a sidecar of its own, which is stopped behind it."""
    local = tempfile.mkdtemp(prefix="dstl-b-")  # short enough for a Unix socket
    backend = ChangelogStateBackend(f"file://{folder}/store", job="bench", local_dir=local, parallelism=partitions)
    try:
        yield backend
    finally:
        with suppress(FileNotFoundError):  # if none was started
            os.kill(int(Path(backend.embedded_service.pid_path).read_text(encoding="utf-8")), signal.SIGTERM)
        shutil.rmtree(local, ignore_errors=True)


def new_session(folder: Path) -> SparkSession:
    """Start Spark with two cores, its RocksDB store and changelog checkpointing."""
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dstl-bench")
        .config("spark.sql.shuffle.partitions", str(WORKLOADS[0].partitions))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "4g")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


def new_stream(spark: SparkSession, rows: int, keys: int, *, with_time: bool = False) -> DataFrame:
    """
    Return a stream of batches of so many rows: key `k` and number `v`.

    `with_time` adds the event time `timestamp`, which goes on by a second per batch.
    """
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    rate = rate.option("startTimestamp", 1_000_000).option("advanceMillisPerBatch", 1000)
    # Multiplying by an odd number permutes the values, so every batch has each key equally often.
    key = F.pmod(F.col("value") * 7919, F.lit(keys)).cast("int")
    return rate.load().select(key.alias("k"), F.col("value").cast("double").alias("v"), *["timestamp"] * with_time)


class _Measured(Exception):  # noqa: N818 - no error: it ends a query between two batches
    """Enough batches were measured."""


def measure(writer: Any, folder: Path, warm_up: int = WARM_UP_BATCHES, measured: int = MEASURED_BATCHES) -> list[int]:
    """
    Run a query into the noop sink; return the trigger times (ms) of the batches behind the first ones.

    Raises:
        TimeoutError: The batches took too long.
    """
    wanted = warm_up + measured

    def save(batch: DataFrame, batch_id: int) -> None:
        if batch_id >= wanted:
            raise _Measured  # stopped from outside, a query would leave its last batch running for a while
        batch.write.format("noop").mode("overwrite").save()

    query: StreamingQuery = writer.foreachBatch(save).option("checkpointLocation", str(folder / "checkpoint")).start()
    try:
        query.awaitTermination(BATCH_TIMEOUT_S * wanted)
    except StreamingQueryException as error:
        if _Measured.__name__ not in str(error):
            raise
    finally:
        query.stop()
    progress = query.recentProgress[warm_up:wanted]
    if len(progress) < measured:
        raise TimeoutError(f"{len(query.recentProgress)} of {wanted} batches in time")
    return [int(batch["durationMs"]["triggerExecution"]) for batch in progress]


if __name__ == "__main__":
    sys.exit(main())
