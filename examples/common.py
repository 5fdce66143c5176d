"""Shared by the small examples: a session, input and output files, and a query that runs until its input is read."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend

START_S = 1_767_225_600  # the first second of 2026


def open_session() -> SparkSession:
    """Start Spark, small enough for a laptop."""
    builder = SparkSession.builder.master("local[2]").appName("examples")
    for name, value in {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def write_files(folder: Path, files: Iterable[list[dict[str, Any]]]) -> None:
    """Write one JSON file per batch; their modification times make Spark's file source read them in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(files):
        path = folder / f"{number:03d}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.utime(path, (START_S + number, START_S + number))


def read_files(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    """Return the files as a stream, one file per batch."""
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


def run_to_end(result: Any, folder: Path) -> None:
    """Run a query over all existing input; write one parquet file per batch, which a repeated batch replaces."""
    output = folder / "output"
    output.mkdir(exist_ok=True)

    def save(batch: DataFrame, batch_id: int) -> None:
        temporary = output / f".{batch_id:05d}"
        pq.write_table(batch.toArrow(), temporary)
        os.replace(temporary, output / f"{batch_id:05d}.parquet")

    writer = result.writeStream.option("checkpointLocation", str(folder / "checkpoint")).foreachBatch(save)
    writer.trigger(availableNow=True).start().awaitTermination()


def read_output(folder: Path) -> pd.DataFrame:
    """Return the rows of all batches."""
    batches: list[pd.DataFrame] = [
        pq.read_table(path).to_pandas() for path in sorted((folder / "output").glob("*.parquet"))
    ]
    return pd.concat(batches, ignore_index=True)


def main(
    description: str,
    write_input: Callable[[Path], None],
    build: Callable[[SparkSession, ChangelogStateBackend, Path], Any],
    show: Callable[[pd.DataFrame], str],
) -> int:
    """Run an example in a temporary folder and print its result."""
    argparse.ArgumentParser(description=description).parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_input(folder / "input")
        spark = open_session()
        place: dict[str, Any] = {"local_dir": str(folder / "local"), "parallelism": 2}
        backend = ChangelogStateBackend(f"file://{folder / 'state'}", job="example", **place)
        run_to_end(build(spark, backend, folder / "input"), folder)
        sys.stdout.write(show(read_output(folder)) + "\n")
        spark.stop()
        # The auto-started sidecar would wait for its idle time; no other process uses it here.
        os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text(encoding="utf-8")), signal.SIGTERM)
    return 0
