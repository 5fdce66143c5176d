"""Shared parts of operator benchmarks: a session, a stream, a backend, and the timing of a query's batches."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from backend_client import ChangelogStateBackend
from tools.spark_session import start_session

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WARM_UP_BATCHES = 3
MEASURED_BATCHES = 5
MEASURED_MIN = 3
BATCH_TIMEOUT_S = 300


@contextmanager
def open_backend(folder: Path, partitions: int, storage: str | None = None) -> Iterator[ChangelogStateBackend]:
    """
    Yield a backend with a sidecar and local files of its own, which are stopped and removed afterwards.

    Args:
        folder: Holds the storage, unless that is elsewhere.
        partitions: Those of the operators.
        storage: The storage's URL; None for a folder.
    """
    local = tempfile.mkdtemp(prefix="dstl-b-")  # short enough for a Unix socket
    storage = storage or f"file://{folder}/store"
    backend = ChangelogStateBackend(storage, job="bench", local_dir=local, parallelism=partitions)
    try:
        yield backend
    finally:
        with suppress(FileNotFoundError):  # if none was started
            os.kill(sidecar_pid(backend), signal.SIGTERM)
        shutil.rmtree(local, ignore_errors=True)


def sidecar_pid(backend: ChangelogStateBackend) -> int:
    """Return the process id of a backend's sidecar; `FileNotFoundError` if none was started."""
    return int(Path(backend.auto_started_sidecar.pid_path).read_text(encoding="utf-8"))


def new_session(folder: Path) -> SparkSession:
    """Start Spark with two cores, its RocksDB store and changelog checkpointing."""
    store = "sql.streaming.stateStore"
    settings = {
        "sql.shuffle.partitions": 4,
        "driver.memory": "4g",
        f"{store}.providerClass": ROCKSDB,
        f"{store}.rocksdb.changelogCheckpointing.enabled": "true",
    }
    return start_session("dstl-bench", settings, folder=folder)


def new_stream(spark: SparkSession, rows: int, keys: int, *, with_time: bool = False) -> DataFrame:
    """
    Return a stream of batches of `rows` rows: key `k` and number `v`.

    `with_time` adds the event time `timestamp`, which advances by a second per batch.
    """
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    rate = rate.option("startTimestamp", 1_000_000).option("advanceMillisPerBatch", 1000)
    # Multiplying by an odd number permutes the values, so every batch has each key equally often.
    key = F.pmod(F.col("value") * 7919, F.lit(keys)).cast("int")
    return rate.load().select(key.alias("k"), F.col("value").cast("double").alias("v"), *["timestamp"] * with_time)


class Enough(Exception):  # noqa: N818 - not an error: it ends a query between two batches
    """Enough batches were executed; a stop from outside would leave the last one running for a while."""


def run_until_enough(writer: Any, checkpoint: Path | str, timeout_s: int | None = None) -> StreamingQuery:
    """Run a query until its function raises `Enough`, or for this time; return it stopped."""
    query: StreamingQuery = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        query.awaitTermination(timeout_s)
    except StreamingQueryException as error:
        if Enough.__name__ not in str(error):
            raise
    finally:
        query.stop()
    return query


def measure(
    writer: Any,
    folder: Path,
    warm_up: int = WARM_UP_BATCHES,
    measured: int = MEASURED_BATCHES,
    *,
    warm_up_s: float = 0,
    measured_s: float = math.inf,
) -> list[int]:
    """
    Run a query into the noop sink; return the trigger times (ms) of the batches that count.

    Args:
        writer: Writer of the query.
        folder: Folder of its checkpoints.
        warm_up: Minimum number of batches before those that count.
        measured: Number of batches that count.
        warm_up_s: Minimum time before the batches that count.
        measured_s: After this time, `MEASURED_MIN` batches suffice.

    Raises:
        TimeoutError: The batches took too long.
    """
    counting = range(0)
    began = time.monotonic()

    def save(batch: DataFrame, batch_id: int) -> None:
        nonlocal counting, began
        elapsed_s = time.monotonic() - began
        if not counting and batch_id >= warm_up and elapsed_s >= warm_up_s:
            counting, began = range(batch_id, batch_id + measured), time.monotonic()
        elif counting and batch_id >= counting.start + MEASURED_MIN and elapsed_s >= measured_s:
            counting = range(counting.start, batch_id)
        if counting and batch_id >= counting.stop:
            raise Enough
        batch.write.format("noop").mode("overwrite").save()

    timeout_s = math.ceil(warm_up_s) + BATCH_TIMEOUT_S * (warm_up + measured)
    query = run_until_enough(writer.foreachBatch(save), folder / "checkpoint", timeout_s)
    progress = [batch for batch in query.recentProgress if batch["batchId"] in counting]
    if not counting or len(progress) < len(counting):
        raise TimeoutError(f"{len(progress)} of {measured} batches in time")
    return [int(batch["durationMs"]["triggerExecution"]) for batch in progress]
