"""
The read side: adds up the result per merchant and minute, as Parquet.

``python -m examples.merchant_orders.totals --output FOLDER``. It is a batch job: run it again for newer totals. It
reads committed records only, and the last one of each key.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from examples.merchant_orders.job import open_session
from examples.merchant_orders.topics import RESULT

ORDER = (
    "merchant_id bigint, merchant string, category string, order_id bigint, ordered_at timestamp, status string, "
    "amount_cents bigint, refunded_cents bigint"
)


def read_orders(spark: SparkSession, servers: str) -> DataFrame:
    """Return the orders that exist."""
    records = (
        spark.read.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", RESULT)
        .load()
    )
    # All records of a key are in one partition, in order. The value of an order that has left is null.
    latest = records.groupBy("key").agg(F.max_by("value", "offset").alias("value")).where("value is not null")
    return latest.select(F.from_json(F.col("value").cast("string"), ORDER).alias("order")).select("order.*")


def totals(orders: DataFrame) -> DataFrame:
    """Add up the orders that are not cancelled."""
    minute = F.date_trunc("minute", "ordered_at").alias("minute")
    return (
        orders.where("status != 'cancelled'")
        .groupBy("merchant_id", "merchant", minute)
        .agg(
            F.count("*").alias("orders"),
            F.sum("amount_cents").alias("amount_cents"),
            F.sum("refunded_cents").alias("refunded_cents"),
        )
        .orderBy("merchant_id", "minute")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the totals per merchant and minute."""
    parser = argparse.ArgumentParser(prog="merchant_orders.totals", description=main.__doc__)
    parser.add_argument("--servers", default=os.environ.get("KAFKA_SERVERS", "localhost:9092"))
    parser.add_argument("--output", type=Path, required=True, help="folder of Parquet files, which is replaced")
    parser.add_argument("--master", default="local[2]", help="Spark's master (default %(default)s)")
    options = parser.parse_args(arguments)
    spark = open_session(options.master)
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")  # moments, which every reader knows
    result = totals(read_orders(spark, options.servers))
    result.coalesce(1).write.mode("overwrite").parquet(options.output.resolve().as_uri())
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
