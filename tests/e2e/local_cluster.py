"""Runs a test's program on a cluster of two executors in processes of their own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from tests.sidecars import end_sidecars
from tools.spark_session import FORKED_WORKERS, SELDOM_POLLED, start_session


def run_on_cluster(run: Callable[[SparkSession, Path, Path], None], cores: int, settings: Mapping[str, str]) -> None:
    """Call `run` with a session, and with the folders that ``--folder`` and ``--local-dir`` name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--local-dir", type=Path, required=True)
    options = parser.parse_args()
    named: dict[str, object] = {name.removeprefix("spark."): value for name, value in settings.items()}
    named = {**FORKED_WORKERS, **SELDOM_POLLED, **named}
    spark = start_session("dstl-cluster", named, master=f"local-cluster[2,{cores},1024]", log_level="WARN")
    try:
        run(spark, options.folder, options.local_dir)
    finally:
        spark.stop()
        end_sidecars(options.local_dir)
