"""
``make bench-recovery``: how long a query's output stops when an executor is killed, with and without standbys.

A standalone cluster of three hosts, each an address of this machine with a local folder and a sidecar of its own. A
query with large state runs twice, first without copies of its tables, then with one of each. Executors are killed with
SIGKILL at random moments, and each time the longest pause between two outputs counts, less the trigger. Every batch's
output is compared with a plain computation.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import psutil
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client import BatchProgress, ChangelogStateBackend
from loadtest.recovery_state import STATE, Blobs
from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, is_set
from tools.servers.service_metrics import read_metric
from tools.servers.spark_cluster import Loopback, SparkCluster

HOSTS = 3
_TIMEOUT_S = 240
_SETTLED_BATCHES = 3
_CALM_BATCHES = 4
"""Batches without a loss before each kill, by which the pauses are judged."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run: keys of 1 KB each, rows per batch, partitions, trigger and kills of each side."""

    keys: int
    rows: int
    partitions: int
    trigger_s: float
    kills: int


FULL = Size(keys=200_000, rows=600, partitions=16, trigger_s=2.0, kills=2)
SHORT = Size(keys=3_000, rows=60, partitions=6, trigger_s=1.0, kills=1)


@dataclass(slots=True)
class Run:
    """What is observed of one query."""

    size: Size
    outputs_s: list[float] = field(default_factory=list)
    progress: list[BatchProgress] = field(default_factory=list)
    wrong_batches: int = 0
    is_over: bool = False

    def save(self, batch: DataFrame, batch_id: int) -> None:
        """Compare a batch's output with its rows, and note when it was there."""
        if self.is_over:
            raise _Enough
        rows, keys = self.size.rows, self.size.keys
        expected = sum((batch_id * rows + at) // keys + 1 for at in range(rows))
        (found,) = batch.selectExpr("count(*)", "sum(n)").collect()
        self.wrong_batches += tuple(found) != (rows, expected)
        self.outputs_s.append(time.monotonic())

    def pauses_s(self, first: int) -> list[float]:
        """Return the times between outputs from one on, less the trigger."""
        times = self.outputs_s[first:]
        return [max(0.0, after - before - self.size.trigger_s) for before, after in pairwise(times)]

    def wait(self, batches: int) -> None:
        """Wait for more outputs."""
        until, wanted = time.monotonic() + _TIMEOUT_S, len(self.outputs_s) + batches
        while len(self.outputs_s) < wanted:
            if time.monotonic() > until:
                raise RuntimeError(f"the query has {len(self.outputs_s)} outputs, not {wanted}")
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one executor: the longest pause of the output, and bytes that tasks restored beyond the usual."""

    pause_s: float
    restored_bytes: float


class _Enough(Exception):  # noqa: N818 - not an error: it ends the query between two batches
    """The kills are done."""


class _Host(Loopback):
    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.{number + 2}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write ``reports/bench-recovery.json``; return the exit code."""
    parser = argparse.ArgumentParser(description="Measure how long the output stops when an executor is killed.")
    parser.add_argument(
        "--short", action="store_true", default=is_set("SHORT"), help="little state, one kill (SHORT=1)"
    )
    parser.add_argument("--strict", action="store_true", default=is_set("STRICT"), help="fail if a goal is missed")
    parser.add_argument("--kills", type=int, help="kills of each side")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the moments of the kills")
    options = parser.parse_args(arguments)
    size, source = SHORT if options.short else FULL, random.Random(options.seed)
    size = replace(size, kills=options.kills or size.kills)
    print(f"seed {options.seed}", flush=True)
    report = TargetReport("bench-recovery", strict=options.strict)
    figures: list[Figure] = []
    pauses: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dstl-r-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        with _cluster(folder) as spark:
            for replicas in (0, 1):
                found, pause_s = _measured(spark, folder, size, replicas, source)
                figures += found
                pauses.append(pause_s)
    figures.append(Figure("pause with standbys / without", pauses[1] / max(pauses[0], 0.001), "ratio"))
    for figure in figures:
        print(f"{figure.name:60} {figure.value:12,.2f} {figure.unit:8} {figure.goal or ''}")
    return report.write(figures)


@contextmanager
def _cluster(folder: Path) -> Iterator[SparkSession]:
    """Run the cluster; yield a session on it."""
    root = str(Path(__file__).parents[1])
    locals_ = [folder / f"host-{number}" for number in range(HOSTS + 1)]
    hosts = [{"DSTL_LOCAL_DIR": str(local), "PYTHONPATH": root} for local in locals_[1:]]
    os.environ.update({"DSTL_LOCAL_DIR": str(locals_[0]), "PYSPARK_PYTHON": sys.executable})
    try:
        with SparkCluster(folder, hosts, machines=[Loopback(), *map(_Host, range(HOSTS))]) as cluster:
            spark = _session(cluster.master_url, folder)
            try:
                yield spark
            finally:
                spark.stop()
    finally:
        _end_helpers(folder)


def _session(master_url: str, folder: Path) -> SparkSession:
    builder = (
        SparkSession.builder.master(master_url)
        .appName("dstl-recovery")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.executor.memory", "700m")
        .config("spark.executor.cores", "1")
        .config("spark.cores.max", str(HOSTS))
        .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
        .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "60s")
        .config("spark.sql.shuffle.partitions", str(HOSTS))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
    )
    for setting in ChangelogStateBackend.recommended_settings():
        builder = builder.config(setting.name, setting.value)
    # All hosts share few cores here: a task that waits for one does not hang, and a host is not free at once.
    builder = builder.config("spark.speculation.minTaskRuntime", "15s").config("spark.locality.wait.node", "15s")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def _measured(
    spark: SparkSession, folder: Path, size: Size, replicas: int, source: random.Random
) -> tuple[list[Figure], float]:
    """Run one query and kill executors; return its figures, and the median pause."""
    run, job = Run(size), f"copies-{replicas}"
    backend = ChangelogStateBackend(
        f"file://{folder}/store", job=job, parallelism=size.partitions, standby_replicas=replicas
    )
    backend.on_progress(run.progress.append)
    stream = (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", size.rows).option("numPartitions", HOSTS)
    )
    rows = stream.load().select(F.pmod("value", F.lit(size.keys)).alias("k"))
    first = spark.range(size.keys).select(F.col("id").alias("k")).groupBy("k")
    result = backend.transform_with_state(rows.groupBy("k"), Blobs(), STATE, "Update", "None", initialState=first)
    writer = result.writeStream.outputMode("update").foreachBatch(run.save)
    writer = writer.trigger(processingTime=f"{size.trigger_s:g} seconds")
    query = writer.option("checkpointLocation", str(folder / f"checkpoint-{replicas}")).start()
    try:
        run.wait(_SETTLED_BATCHES)
        losses = []
        for number in range(size.kills):
            _wait_for_copies(run, size, replicas)
            losses.append(_lose(spark, folder, run, job, 2 + number % HOSTS, source))
            print(f"{job}: {losses[-1]}; {run.progress[-1].to_text()}", flush=True)
        settled = _wait_for_copies(run, size, replicas)
    finally:
        run.is_over = True
        with suppress(StreamingQueryException):
            query.awaitTermination(_TIMEOUT_S)
        query.stop()
    return _figures(run, losses, settled, replicas), statistics.median(loss.pause_s for loss in losses)


def _figures(run: Run, losses: Sequence[Loss], settled: BatchProgress, replicas: int) -> list[Figure]:
    name = "with standbys" if replicas else "without standbys"
    state_ms = statistics.median(progress.total_ms for progress in run.progress[1:])
    restored = max(loss.restored_bytes for loss in losses)
    table_bytes = run.progress[-1].table_bytes
    return [
        Figure(f"state, {name}", table_bytes / 1e6, "MB"),
        Figure(f"batch, median, {name}", state_ms, "ms"),
        Figure(f"wrong batches, {name}", run.wrong_batches, "batches", Goal("==", 0)),
        Figure(f"pause at a SIGKILL, median, {name}", statistics.median(loss.pause_s for loss in losses), "s"),
        Figure(f"pause at a SIGKILL, longest, {name}", max(loss.pause_s for loss in losses), "s"),
        Figure(
            f"restored at a SIGKILL, most, {name}",
            restored / 1e6,
            "MB",
            Goal("<=", 0.2 * table_bytes / 1e6 / HOSTS) if replicas else None,
        ),
        *(
            [
                Figure("partitions", run.size.partitions, "partitions"),
                Figure("complete copies after the last kill", settled.standby_tables, "copies"),
                Figure("lag of copies after the last kill", settled.standby_lag, "checkpoints", Goal("<=", 5)),
            ]
            if replicas
            else []
        ),
    ]


def _wait_for_copies(run: Run, size: Size, replicas: int) -> BatchProgress:
    """Wait until every table has a recent copy; without standbys for some calm batches. Return the batch's figures."""
    run.wait(_CALM_BATCHES)
    until = time.monotonic() + _TIMEOUT_S
    while True:
        newest = run.progress[-1]
        if not replicas:
            return newest
        if newest.standby_tables == size.partitions and not newest.standby_missing and newest.standby_lag <= 5:
            return newest
        if time.monotonic() > until:
            raise RuntimeError(f"the copies are not complete: {newest.to_text()}")
        time.sleep(0.1)


def _lose(spark: SparkSession, folder: Path, run: Run, job: str, number: int, source: random.Random) -> Loss:
    """Kill an executor at a random moment; return what that cost."""
    calm = len(run.outputs_s)
    before = _restored(folder, job)
    run.wait(_CALM_BATCHES)
    usual = (_restored(folder, job) - before) / (len(run.outputs_s) - calm)
    first = len(run.outputs_s) - 1
    begun, before = first, _restored(folder, job)
    time.sleep(source.uniform(0, run.size.trigger_s))
    _kill_executor(spark.sparkContext.applicationId, f"127.0.0.{number}")
    run.wait(_SETTLED_BATCHES + 1)
    more = _restored(folder, job) - before - usual * (len(run.outputs_s) - 1 - begun)
    return Loss(max(run.pauses_s(first)), max(0.0, more))


def _kill_executor(application: str, host: str) -> None:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if application in words and "--hostname" in words and words[words.index("--hostname") + 1] == host:
            process.send_signal(signal.SIGKILL)


def _restored(folder: Path, job: str) -> float:
    """Return the bytes that all sidecars have sent to tasks' tables so far."""
    return sum(read_metric(socket, "dstl_restored_bytes_total", job) for socket in folder.glob("host-*/service-*.sock"))


def _end_helpers(folder: Path) -> None:
    """End the sidecars and followers of all hosts, by their process ids."""
    for file in [*folder.glob("host-*/service-*.pid"), *folder.glob("host-*/standby/*/pid")]:
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text(encoding="utf-8")), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
