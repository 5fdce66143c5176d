"""
A driver of the benchmark: ``python -m loadtest.bench_recovery.query PLAN`` runs one query until it is told to stop.

It appends a line of JSON to the file `OBSERVED` for each output, each batch's figures, and each batch's duration; times
are those of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from backend_client import BatchProgress, ChangelogStateBackend
from loadtest.bench.measuring import ROCKSDB, Enough
from loadtest.bench_recovery.plan import HOSTS, QueryPlan
from loadtest.bench_recovery.processor import OUTPUT, Blobs
from tools.spark_session import start_session

OBSERVED, STOP, EVENTS = "observed.jsonl", "stop", "events"
CORES = 2
"""Tasks that an executor runs at a time: a restore beside the batches has a core of its own."""
LOST_FRACTION_MAX = 0.2
"""With a quarter of the partitions on each host and a loss twice a minute, the usual 0.005 would make batches wait."""
_JOB = "recovery"


class _Observer:
    """Writes what is seen of a query."""

    def __init__(self, folder: Path) -> None:
        self._stop = folder / STOP
        self._file = (folder / OBSERVED).open("a", encoding="utf-8", buffering=1)

    def save(self, batch: DataFrame, batch_id: int) -> None:
        """Note a batch's output; the query's function."""
        if self._stop.exists():
            raise Enough
        rows = [tuple(row) for row in batch.collect()]
        self._note("output", batch=batch_id, rows=rows)

    def progress(self, progress: BatchProgress) -> None:
        """Note a batch's figures."""
        self._note("progress", **asdict(progress))

    def follow(self, query: StreamingQuery) -> None:
        """Note the batches' durations until the query ends."""
        seen = -1
        while query.isActive:
            for batch in query.recentProgress:
                if batch["batchId"] > seen and batch["numInputRows"]:
                    seen = batch["batchId"]
                    self._note("batch", batch=seen, ms=batch["durationMs"]["triggerExecution"])
            query.awaitTermination(1)

    def _note(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **fields}) + "\n")


def main(plan: QueryPlan) -> None:
    """Run the query until it is told to stop."""
    spark = _session(plan)
    observer = _Observer(Path(plan.folder))
    size = plan.size
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", size.rows)
    rows = stream.option("numPartitions", HOSTS).load().select(F.pmod("value", F.lit(size.keys)).alias("k"))
    first = spark.range(size.keys).select(F.col("id").alias("k")).groupBy("k")
    result: Any
    if plan.column.is_ours:
        backend = _backend(plan)
        backend.on_progress(observer.progress)
        result = backend.transform_with_state(rows.groupBy("k"), Blobs(), OUTPUT, "Update", "None", initialState=first)
    else:
        result = rows.groupBy("k").transformWithState(Blobs(), OUTPUT, "Update", "None", first)
    writer = result.writeStream.outputMode("update").foreachBatch(observer.save)
    writer = writer.trigger(processingTime=f"{round(size.trigger_s * 1000)} milliseconds")
    query = writer.option("checkpointLocation", plan.checkpoint).start()
    try:
        observer.follow(query)
    except StreamingQueryException as error:
        if Enough.__name__ not in str(error):
            raise
    finally:
        query.stop()
        spark.stop()


def _backend(plan: QueryPlan) -> ChangelogStateBackend:
    column = plan.column
    return ChangelogStateBackend(
        plan.storage,
        job=_JOB,
        parallelism=plan.size.partitions,
        standby_replicas=column.replicas,
        failover=column.failover,
        max_lost_fraction=LOST_FRACTION_MAX,
        lost_rows="forget",
    )


def _session(plan: QueryPlan) -> SparkSession:
    events = Path(plan.folder) / EVENTS
    events.mkdir(exist_ok=True)
    settings: dict[str, object] = {
        "driver.host": plan.address,
        "driver.bindAddress": plan.address,
        "driver.memory": "1g",
        "executor.memory": "700m",
        "executor.cores": CORES,
        "cores.max": CORES * HOSTS,
        "deploy.maxExecutorRetries": -1,
        "scheduler.minRegisteredResourcesRatio": "1.0",
        "scheduler.maxRegisteredResourcesWaitingTime": "60s",
        "eventLog.enabled": "true",
        "eventLog.dir": events.as_uri(),
        "eventLog.compress": "false",
        "eventLog.rolling.enabled": "false",
        "sql.shuffle.partitions": HOSTS if plan.column.is_ours else plan.size.partitions,
        "sql.streaming.stateStore.providerClass": ROCKSDB,
        "sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    # Both sides notice a lost executor equally soon.
    for setting in ChangelogStateBackend.recommended_settings():
        settings[setting.name.removeprefix("spark.")] = setting.value
    # All hosts share few cores here: a task that waits for one does not hang, and a host is not free at once.
    settings |= {"speculation.minTaskRuntime": "15s", "locality.wait.node": "15s"}
    more = dict(pair.split("=", 1) for pair in os.environ.get("DSTL_BENCH_SPARK", "").split())
    return start_session("dstl-recovery", settings | more, master=plan.master, folder=Path(plan.folder))


if __name__ == "__main__":
    main(QueryPlan.read(Path(sys.argv[1])))
