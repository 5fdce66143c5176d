"""
The driver of the cluster tests: a query over all existing input, with its figures written to a file.

With ``--apart``, the same job then runs in another storage, without links between its hosts' sidecars.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import OUTPUT, Collected, Totals, read_input, run_to_end
from tools.spark_session import FORKED_WORKERS, start_session


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--master", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--apart")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--wait-for", type=Path)
    options = parser.parse_args()
    settings = {
        **FORKED_WORKERS,
        "driver.host": options.host,
        "driver.bindAddress": options.host,
        "driver.memory": "1g",
        "executor.memory": "700m",
        "executor.cores": 1,
        "shuffle.reduceLocality.enabled": "false",
        "locality.wait": "60s",  # however long a task takes, its executor has the next task's table
        "cores.max": 2,  # for both workers; by default Spark expects none, and waits for none
        "scheduler.minRegisteredResourcesRatio": 1.0,
        "scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    spark = start_session("dstl-cluster", settings, master=options.master, folder=options.folder, log_level="ERROR")
    run(spark, options.folder, "result", options.storage, links=True)
    if options.apart is not None:
        run(spark, options.folder, "apart", options.apart, links=False)
    while options.wait_for is not None and not options.wait_for.exists():
        time.sleep(0.1)


def run(spark: SparkSession, folder: Path, name: str, storage: str, *, links: bool) -> None:
    """Run the job to its end; write its output and figures to a file of that name."""
    backend = ChangelogStateBackend(storage, job="job", parallelism=4, links=links)
    collected = Collected()
    totals = backend.transform_with_state(
        read_input(spark, folder / "in").groupBy("k"), Totals(pause_s=0.01), OUTPUT, "Update", "None"
    )
    sessions: list[bool] = []

    def function(batch: DataFrame, batch_id: int) -> None:
        sessions.append(bool(batch.sparkSession._jsparkSession.equals(spark._jsparkSession)))
        collected(batch, batch_id)

    run_to_end(totals.writeStream, folder / f"chk-{name}", function)
    assert not any(sessions), "a batch must belong to its query's own session, whose settings are its own"
    result = {"batches": collected.batches, "progress": [asdict(progress) for progress in backend.recent_progress]}
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
