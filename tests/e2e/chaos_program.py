"""
The program that the chaos test kills: runs small jobs one after the other on a cluster of separate executors.

After a restart it continues with the interrupted job. Output is one file per batch, replaced as a whole; the file
``<job>/done`` marks a finished job, ``<job>/started`` a running query. From the batch that ``<job>/hold`` names, a job
waits until ``<job>/met`` exists, so its event meets it however fast the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import OUTPUT, Totals, read_input, run_to_end
from tools.spark_session import EXECUTORS_DIE, TWO_EXECUTORS, start_session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--local-dir", required=True)
    parser.add_argument("--jobs", nargs="+", required=True)
    options = parser.parse_args()
    settings = {**EXECUTORS_DIE, "driver.memory": "1g"}
    spark = start_session("dstl-chaos", settings, master=TWO_EXECUTORS, folder=options.folder, log_level="ERROR")
    for job in options.jobs:
        if not (options.folder / job / "done").exists():
            run(spark, options, job)


def run(spark: SparkSession, options: argparse.Namespace, job: str) -> None:
    folder = options.folder / job
    backend = ChangelogStateBackend(options.storage, job=job, local_dir=options.local_dir, parallelism=3, patience_s=8)
    totals = backend.transform_with_state(
        read_input(spark, folder / "in").groupBy("k"), Totals(pause_s=0.01), OUTPUT, "Update", "None"
    )

    hold = int((folder / "hold").read_text(encoding="utf-8"))

    def save(batch: DataFrame, batch_id: int) -> None:
        while batch_id >= hold and not (folder / "met").exists():
            time.sleep(0.05)
        rows = sorted((list(row) for row in batch.collect()), key=repr)
        temporary = folder / f"out-{batch_id}.tmp"
        temporary.write_text(json.dumps(rows), encoding="utf-8")
        os.replace(temporary, folder / f"out-{batch_id}.json")

    (folder / "started").touch()
    run_to_end(totals.writeStream, folder / "chk", save)
    (folder / "done").touch()


if __name__ == "__main__":
    main()
