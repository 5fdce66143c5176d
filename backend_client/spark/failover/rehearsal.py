"""
Has executors load what Spark needs when a task fails, before one does.

The first error in a JVM reads the texts of all of Spark's errors: half a second of processor time, in all executors at
once, when they cannot read the rows of a lost one and the whole query waits for them.
"""

from __future__ import annotations

import logging
import threading

from pyspark.sql import SparkSession

from backend_client.spark.own_session import own_session

logger = logging.getLogger("backend_client")

_begun: set[str] = set()


def failing(column: str) -> str:
    """Return an expression of an integer column for which Spark makes an error and drops it; its value is true."""
    return f"try_to_binary(concat('g', {column}), 'hex') is null"


def rehearse(spark: SparkSession) -> threading.Thread | None:
    """Let one task per core fail inwardly, beside the batches, once per application; in one process there is no use."""
    context = spark.sparkContext
    master = str(context.master)
    if (master.startswith("local") and not master.startswith("local-cluster")) or context.applicationId in _begun:
        return None
    _begun.add(str(context.applicationId))
    thread = threading.Thread(target=_run, args=(spark,), name="dstl-rehearsal", daemon=True)
    thread.start()
    return thread


def _run(spark: SparkSession) -> None:
    try:
        own = own_session(spark)
        cores = own.sparkContext.defaultParallelism
        own.range(0, cores, 1, cores).selectExpr(failing("id")).collect()
    except Exception as error:  # noqa: BLE001 - it only saves time
        logger.debug("executors have not loaded what a failure needs: %s", error)
