"""Spark sessions of tests and load tests: on loopback, without a user interface, with few partitions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

TWO_EXECUTORS = "local-cluster[2,1,1024]"
"""Master of a cluster of two executors in processes of their own."""

FORKED_WORKERS: Mapping[str, object] = {"python.daemon.module": "backend_client.spark.api.worker_daemon"}
"""Python workers are forked from a process that has imported what they need, as is recommended to users."""

SELDOM_POLLED: Mapping[str, object] = {"sql.streaming.pollingDelay": "50ms"}
"""
A query that has no data lists its folders less often than every 10 ms, which would take most of a core.

Not for benchmarks: rows wait for so much longer.
"""

EXECUTORS_DIE: Mapping[str, object] = {
    **FORKED_WORKERS,
    "executor.memory": "1g",
    "task.maxFailures": 8,
    "deploy.maxExecutorRetries": -1,
    # A hanging process is given up within seconds.
    "executor.heartbeatInterval": "1s",
    "network.timeout": "10s",
    "network.timeoutInterval": "2s",
    "storage.blockManagerHeartbeatTimeoutMs": 10_000,
}
"""Settings of a cluster whose executors are killed or suspended again and again."""


def start_session(
    name: str,
    settings: Mapping[str, object],
    *,
    master: str = "local[2]",
    folder: Path | None = None,
    log_level: str = "OFF",
) -> SparkSession:
    """
    Start a session.

    Args:
        name: Name of the application.
        settings: Spark's settings, without the prefix ``spark.``; they override the common ones.
        master: Where executors run.
        folder: Holds the warehouse of tables; None for the working directory.
        log_level: Level of Spark's log from now on.
    """
    common = {"ui.enabled": "false", "ui.showConsoleProgress": "false", "driver.host": "127.0.0.1"}
    if folder is not None:
        common["sql.warehouse.dir"] = str(folder / "warehouse")
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**common, "sql.shuffle.partitions": 2, **settings}.items():
        builder = builder.config(f"spark.{key}", str(value))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel(log_level)
    return session
