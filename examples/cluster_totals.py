"""
A job for a cluster, standalone or on YARN: counts orders per customer from Spark's rate source and checks every batch.

Every batch has the same number of orders for each customer, so all totals are known; a wrong one ends the job with an
error. The job needs no input data, so it shows within a minute whether a cluster, its sidecars and the storage work
together. Run it again to continue from the last checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from backend_client import ChangelogStateBackend

CUSTOMERS = 100
ORDERS_PER_BATCH = 2_000
OUTPUT = "customer long, orders long"


class Totals(StatefulProcessor):
    """Counts the orders of each customer."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self.totals = handle.getValueState("totals", "orders long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Add the rows."""
        (orders,) = self.totals.get() or (0,)
        orders += sum(1 for _ in rows)
        self.totals.update((orders,))
        yield Row(customer=key[0], orders=orders)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class _Enough(Exception):  # noqa: N818 - not an error: it ends the query between two batches
    """All batches are done."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; return the exit code."""
    parser = argparse.ArgumentParser(description="Count orders per customer on a cluster.")
    parser.add_argument("--master", required=True, help="spark://host:port, or yarn")
    parser.add_argument("--driver-host", help="address of this host for workers (default: Spark's choice)")
    parser.add_argument("--storage", required=True, help="file:///path or s3://bucket/prefix")
    parser.add_argument("--checkpoint", required=True, help="folder of the Spark checkpoint")
    parser.add_argument("--batches", type=int, default=5, help="how many batches to run (default %(default)s)")
    parser.add_argument("--parallelism", type=int, default=4, help="partitions of the state (default %(default)s)")
    parser.add_argument(
        "--cores", type=int, help="cores of the cluster: start when all are registered, and use no more"
    )
    options = parser.parse_args(arguments)
    spark = _session(options)
    try:
        run(spark, options.storage, options.checkpoint, options.batches, options.parallelism)
    finally:
        spark.stop()
    return 0


def run(spark: SparkSession, storage: str, checkpoint: str, batches: int, parallelism: int) -> None:
    """Run `batches` batches and check each."""
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ORDERS_PER_BATCH).load()
    orders = rate.select((F.col("value") % CUSTOMERS).alias("customer"))
    backend = ChangelogStateBackend(storage, job="cluster-totals", parallelism=parallelism)
    totals = backend.transform_with_state(orders.groupBy("customer"), Totals(), OUTPUT, "Update", "None")
    seen = 0

    def check(batch: DataFrame, batch_id: int) -> None:
        nonlocal seen
        if seen == batches:
            raise _Enough
        rows = batch.collect()
        expected = (batch_id + 1) * ORDERS_PER_BATCH // CUSTOMERS
        wrong = [row for row in rows if row.orders != expected]
        if wrong or len(rows) != CUSTOMERS:
            raise AssertionError(
                f"batch {batch_id}: {len(rows)} customers, expected {expected} orders each: {wrong[:3]}"
            )
        seen += 1
        print(f"batch {batch_id}: {len(rows)} customers with {expected} orders each", flush=True)

    query = totals.writeStream.option("checkpointLocation", checkpoint).foreachBatch(check).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        if _Enough.__name__ not in str(error):
            raise
    finally:
        query.stop()


def _session(options: argparse.Namespace) -> SparkSession:
    builder = SparkSession.builder
    if options.cores is not None:
        builder = (
            builder.config("spark.cores.max", options.cores)
            .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
            .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "120s")
        )
    if options.driver_host is not None:
        builder = builder.config("spark.driver.host", options.driver_host)
    session = (
        builder.master(options.master)
        .appName("dstl-cluster-totals")
        .config("spark.executor.memory", "700m")
        .config("spark.shuffle.reduceLocality.enabled", "false")  # partitions stay where their tables are
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", f"{options.checkpoint}-warehouse")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    return session


if __name__ == "__main__":
    sys.exit(main())
