"""
A driver of the benchmark: ``python -m loadtest.bench_requests.query PLAN`` runs a query for some batches.

Each batch changes the state of all partitions. Both sides keep Spark's checkpoint on S3; only the state differs.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pyspark.sql import DataFrame

from backend_client import ChangelogStateBackend
from loadtest.bench.measuring import ROCKSDB, Enough, new_stream, run_until_enough
from loadtest.bench.processors import TOTALS, Totals
from tools.spark_session import start_session

CORES = 2
_KEYS_PER_PARTITION = 10
_FILE_SYSTEM = "hadoop.fs.s3a"


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """
    The instructions for a driver's program.

    Args:
        is_ours: Whether the state is on this backend; else in Spark's own store with changelog checkpointing.
        partitions: Those of the operator.
        batches: How many are run.
        hosts: The cluster's number of executors.
        master: The cluster's URL.
        address: The driver's address.
        prefix: Bucket and prefix of everything that the query stores, without a scheme.
        jars: Class path of Hadoop's file system for S3.
        folder: For Spark's local files.
    """

    is_ours: bool
    partitions: int
    batches: int
    hosts: int
    master: str
    address: str
    prefix: str
    jars: str
    folder: str

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def main(plan: QueryPlan) -> None:
    """Run the batches."""
    spark = start_session("dstl-requests", _settings(plan), master=plan.master, folder=Path(plan.folder))
    rows = plan.partitions * _KEYS_PER_PARTITION
    grouped = new_stream(spark, rows, rows).groupBy("k")
    result: Any
    if plan.is_ours:
        partitions = plan.partitions
        backend = ChangelogStateBackend(
            f"s3://{plan.prefix}/state", job="requests", parallelism=partitions, max_parallelism=max(128, partitions)
        )
        result = backend.transform_with_state(grouped, Totals(), TOTALS, "Update", "None")
    else:
        result = grouped.transformWithState(Totals(), TOTALS, "Update", "None")

    def save(batch: DataFrame, batch_id: int) -> None:
        if batch_id >= plan.batches:
            raise Enough
        batch.write.format("noop").mode("overwrite").save()

    try:
        run_until_enough(result.writeStream.outputMode("update").foreachBatch(save), f"s3a://{plan.prefix}/checkpoint")
    finally:
        spark.stop()


def _settings(plan: QueryPlan) -> dict[str, object]:
    return {
        "driver.host": plan.address,
        "driver.bindAddress": plan.address,
        "driver.memory": "1g",
        "driver.extraClassPath": plan.jars,
        "executor.extraClassPath": plan.jars,
        "executor.memory": "900m",
        "executor.cores": CORES,
        "cores.max": CORES * plan.hosts,
        "scheduler.minRegisteredResourcesRatio": "1.0",
        "scheduler.maxRegisteredResourcesWaitingTime": "60s",
        "sql.shuffle.partitions": plan.hosts if plan.is_ours else plan.partitions,
        "sql.streaming.stateStore.providerClass": ROCKSDB,
        "sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        f"{_FILE_SYSTEM}.endpoint": os.environ["AWS_ENDPOINT_URL_S3"],
        f"{_FILE_SYSTEM}.endpoint.region": os.environ["AWS_REGION"],
        f"{_FILE_SYSTEM}.access.key": os.environ["AWS_ACCESS_KEY_ID"],
        f"{_FILE_SYSTEM}.secret.key": os.environ["AWS_SECRET_ACCESS_KEY"],
        f"{_FILE_SYSTEM}.path.style.access": "true",
        f"{_FILE_SYSTEM}.connection.ssl.enabled": "false",
    }


if __name__ == "__main__":
    main(QueryPlan.read(Path(sys.argv[1])))
