"""
The driver of the Kafka test: a job between two topics that reads all existing rows, or dies within a batch.

``--die-in-batch`` kills the process when the batch's rows are in Kafka and its checkpoint does not exist yet, and the
offsets of the checkpoint before are committed to the consumer group. ``--fork`` forks the job when it has read all,
and runs the fork over more rows, exactly once to a topic of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from backend_client import ChangelogStateBackend
from backend_client.service.job_session import JobSession
from tests.e2e.support import INPUT, OUTPUT, Totals
from tests.support.kafka_reader import committed_offsets
from tests.waiting import wait_until
from tools.spark_session import FORKED_WORKERS, start_session

PARTITIONS = 2
GROUP = "lag"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", required=True)
    parser.add_argument("--jars", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local-dir", required=True)
    parser.add_argument("--produce", type=Path, required=True, help="rows for the input's topic")
    parser.add_argument("--die-in-batch", type=int)
    parser.add_argument("--fork", type=Path, help="rows for a fork of the job")
    options = parser.parse_args()
    settings = {
        **FORKED_WORKERS,
        "jars": options.jars,
        "driver.memory": "1g",
        "driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # it lives for seconds
    }
    spark = start_session("dstl-kafka", settings, folder=options.folder, log_level="ERROR")
    produce(spark, options.servers, json.loads(options.produce.read_text(encoding="utf-8")))
    if options.die_in_batch is not None:
        die_before_checkpoint(options.die_in_batch, options.servers)
    run(spark, options, "job", "out", consumerGroup=GROUP)
    seen = (
        spark.read.format("kafka")
        .options(**{"kafka.bootstrap.servers": options.servers, "subscribe": "out"})
        .load()
        .select(F.col("key").cast("string"), F.from_json(F.col("value").cast("string"), OUTPUT).alias("row"))
        .select("key", "row.*")
    )
    rows = json.dumps([list(row) for row in seen.collect()])
    (options.folder / "out.json").write_text(rows, encoding="utf-8")
    if options.fork is not None:
        produce(spark, options.servers, json.loads(options.fork.read_text(encoding="utf-8")))
        run(spark, options, "fork", "forked", fork_of="job", guarantee="exactly-once")


def produce(spark: SparkSession, servers: str, rows: list[tuple[str | None, float]]) -> None:
    """Append rows to the input's topic; a key's rows stay in order, because they go to one partition."""
    messages = [(json.dumps({"k": k, "v": v}), len(k or "") % PARTITIONS) for k, v in rows]
    frame = spark.createDataFrame(messages, "value string, partition int").coalesce(1)
    frame.write.format("kafka").options(**{"kafka.bootstrap.servers": servers, "topic": "in"}).save()


def die_before_checkpoint(batch_id: int, servers: str) -> None:
    """Kill this process when it is about to complete a checkpoint, and has committed the offsets of the one before."""
    complete = JobSession.complete

    def dying(self: JobSession, checkpoint_id: int, plan: Any) -> Any:
        if checkpoint_id == batch_id:
            wait_until(lambda: committed_offsets(servers, GROUP))
            os.kill(os.getpid(), signal.SIGKILL)
        return complete(self, checkpoint_id, plan)

    JobSession.complete = dying  # type: ignore[method-assign]  # a driver that dies in it


def run(
    spark: SparkSession, options: argparse.Namespace, job: str, topic: str, fork_of: str | None = None, **writing: str
) -> None:
    """Run a job over all rows in its topic."""
    stream = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", options.servers)
        .option("subscribe", "in")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 80)
        .load()
        .select(F.from_json(F.col("value").cast("string"), INPUT).alias("row"))
        .select("row.*")
    )
    backend = ChangelogStateBackend(
        f"file://{options.folder / 'store'}", job=job, local_dir=options.local_dir, parallelism=2, fork_of=fork_of
    )
    totals = backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")
    query = (
        totals.selectExpr("k as key", "to_json(struct(k, n, s)) as value")
        .writeStream.format("kafka")
        .option("kafka.bootstrap.servers", options.servers)
        .option("topic", topic)
        .options(**writing)
        .option("checkpointLocation", str(options.folder / f"chk-{job}"))
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
