"""
The streaming query: change events from Kafka, joined, to Kafka, each record exactly once.

``python -m examples.merchant_orders.job --storage file:///… --checkpoint …`` runs it until SIGTERM or Ctrl-C; then it
processes and publishes what is there. Spark needs its Kafka connector, for example from ``spark-submit --packages``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from backend_client.sinks.kafka import KafkaSink
from examples.merchant_orders.changes import SORTED_OUT, sort_out
from examples.merchant_orders.processor import RECORD, OrdersOfMerchant
from examples.merchant_orders.topics import SOURCES

JOB = "merchant-orders"


def build(spark: SparkSession, backend: ChangelogStateBackend, servers: str) -> Any:
    """Build the query; its columns are those of a Kafka record."""
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", ",".join(SOURCES))
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 1000)
        .load()
        .select("topic", "partition", "offset", "key", "value")
    )
    changes = records.mapInArrow(sort_out, SORTED_OUT)
    # The time mode is for the TTL of what the state remembers of deleted orders.
    return backend.transform_with_state(
        changes.groupBy("merchant_id"), OrdersOfMerchant(), RECORD, "Update", "ProcessingTime", name="orders"
    )


def open_session(master: str) -> SparkSession:
    """Start Spark, small enough for a laptop."""
    builder = SparkSession.builder.master(master).appName(JOB)
    for name, value in {
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def open_backend(storage: str, local_dir: str = "") -> ChangelogStateBackend:
    """Return the job's backend."""
    return ChangelogStateBackend(storage, job=JOB, local_dir=local_dir, parallelism=2)


def run(options: argparse.Namespace) -> None:
    """Run the query until the process is asked to end."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    spark = open_session(options.master)
    result = build(spark, open_backend(options.storage, options.local_dir), options.servers)
    query = (
        result.writeStream.sink(KafkaSink(options.servers))  # each row names its topic
        .option("checkpointLocation", str(options.checkpoint))
        .trigger(processingTime="250 milliseconds")
        .start()
    )
    while not ending.wait(0.2) and query.isActive:
        pass
    if query.isActive:
        query.processAllAvailable()
    query.stop()  # returns when everything is published
    if (error := query.exception()) is not None:
        raise error
    spark.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the shop's change events, and publish orders with their merchants and refunds."""
    parser = argparse.ArgumentParser(prog="merchant_orders.job", description=main.__doc__)
    parser.add_argument("--servers", default=os.environ.get("KAFKA_SERVERS", "localhost:9092"))
    parser.add_argument("--storage", required=True, help="where the state is kept: file:///… or s3://…")
    parser.add_argument("--checkpoint", type=Path, required=True, help="Spark's checkpoint folder of the query")
    parser.add_argument("--local-dir", default="", help="folder for the backend's tables (default: one per user)")
    parser.add_argument("--master", default="local[2,4]", help="Spark's master (default %(default)s)")
    run(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
