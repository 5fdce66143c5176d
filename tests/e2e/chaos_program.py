"""
The program that the chaos tests kill: runs small jobs one after the other on a cluster of separate executors.

After a restart it continues with the interrupted job. Output is one file per batch, replaced as a whole; the file
``<job>/done`` marks a finished job, ``<job>/started`` a running query. From the batch that ``<job>/hold`` names, a job
waits until ``<job>/met`` exists, so its event meets it however fast the machine is.

A job with ``<job>/options.json`` has these options of the backend. Its last file comes when all others have run, in a
run that is exact and so runs all rows that wait; ``<job>/waiting`` says how many did after the newest batch, and with
``waiting`` in ``<job>/hold`` it holds when some do. A number in ``<job>/rescale`` is the parallelism that it is to have
from now on. Each of its starts calls the operator by another name. ``groups.json`` has the key group of each key.

The fork of a job, with the folder ``<job>-fork``, runs after it, over the same input.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from backend_client import BatchProgress, ChangelogStateBackend
from dstl_service.registry.job_store import JobStore
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.support import INPUT, OUTPUT, Totals, read_input, run_to_end
from tools.spark_session import EXECUTORS_DIE, TWO_EXECUTORS, start_session

OPERATOR = "Totals"
MAX_PARALLELISM = 128
FORK = "-fork"
"""The suffix that the name of a job's fork adds to that of the job."""
HELD_BACK = "last.json"
"""The file that a job with options gets last, before it has its name in the folder of the input."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--local-dir", help="without it, each host's own")
    parser.add_argument("--jobs", nargs="+", required=True)
    parser.add_argument("--master", default=TWO_EXECUTORS)
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of Spark, as JSON")
    options = parser.parse_args()
    settings = {**EXECUTORS_DIE, "driver.memory": "1g", **options.settings}
    spark = start_session("dstl-chaos", settings, master=options.master, folder=options.folder, log_level="ERROR")
    for job in options.jobs:
        for name in (job, f"{job}{FORK}"):
            folder = options.folder / name
            if (folder / "hold").exists() and not (folder / "done").exists():
                run(spark, options, name)


def run(spark: SparkSession, options: argparse.Namespace, job: str) -> None:
    folder = options.folder / job
    given: dict[str, Any] = {"local_dir": options.local_dir or "", "parallelism": 3}
    chosen = folder / "options.json"
    if chosen.exists():
        write_groups(spark, options.folder)
        given |= json.loads(chosen.read_text(encoding="utf-8"))

    def started() -> tuple[ChangelogStateBackend, Any]:
        before = operator_name(options.storage, job) if chosen.exists() else None
        name = OPERATOR if before is None else f"renamed-{int(before.partition('-')[2] or 0) + 1}"
        renamed = {} if before is None else {before: name}
        backend = ChangelogStateBackend(options.storage, job=job, patience_s=8, renamed=renamed, **given)
        backend.on_progress(lambda progress: note_waiting(folder, progress))
        stream = read_input(spark, options.folder / job.removesuffix(FORK) / "in").groupBy("k")
        totals = backend.transform_with_state(stream, Totals(pause_s=0.01), OUTPUT, "Update", "None", name=name)
        return backend, totals.writeStream

    hold = (folder / "hold").read_text(encoding="utf-8")

    def holds(batch_id: int) -> bool:
        return rows_wait(folder) if hold == "waiting" else batch_id >= int(hold)

    def save(batch: DataFrame, batch_id: int) -> None:
        while holds(batch_id) and not (folder / "met").exists():
            time.sleep(0.05)
        rescale_if_asked(running, folder)
        rows = sorted((list(row) for row in batch.collect()), key=repr)
        temporary = folder / f"out-{batch_id}.tmp"
        temporary.write_text(json.dumps(rows), encoding="utf-8")
        os.replace(temporary, folder / f"out-{batch_id}.json")

    (folder / "started").touch()
    running, writer = started()
    if chosen.exists():
        run_but_last(writer, folder, save)
        running, writer = started()
    run_to_end(writer, folder / "chk", save)
    (folder / "done").touch()


def operator_name(storage: str, job: str) -> str | None:
    """Return what the newest checkpoint of a job calls its operator; None for a new job."""
    newest = JobStore(open_store(storage), job, SystemClock(), SystemIds()).newest()
    return None if newest is None else next(info.label for info in newest.operators if info.has_table)


def run_but_last(writer: Any, folder: Path, save: Any) -> None:
    """Run a query over all files but the last one, and let that come."""
    last = folder / HELD_BACK
    if not last.exists():
        return
    query = writer.option("checkpointLocation", str(folder / "chk")).foreachBatch(save).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    last.rename(folder / "in" / f"{len(list((folder / 'in').glob('*.json'))):05d}.json")


def note_waiting(folder: Path, progress: BatchProgress) -> None:
    (folder / "waiting.tmp").write_text(str(progress.rows_waiting), encoding="utf-8")
    os.replace(folder / "waiting.tmp", folder / "waiting")


def rows_wait(folder: Path) -> bool:
    return (folder / "waiting").exists() and (folder / "waiting").read_text(encoding="utf-8") != "0"


def write_groups(spark: SparkSession, folder: Path) -> None:
    """Have Spark compute the key group of each key of the jobs' input."""
    keys = spark.read.schema(INPUT).json([str(path) for path in folder.glob("*/in")]).select("k").distinct()
    rows = keys.selectExpr("k", f"pmod(hash(k), {MAX_PARALLELISM})").collect()
    (folder / "groups.tmp").write_text(json.dumps([list(row) for row in rows]), encoding="utf-8")
    os.replace(folder / "groups.tmp", folder / "groups.json")


def rescale_if_asked(backend: ChangelogStateBackend, folder: Path) -> None:
    asked = folder / "rescale"
    if asked.exists():
        (operator,) = backend.parallelism()
        backend.rescale(operator, int(asked.read_text(encoding="utf-8")))
        asked.unlink()


if __name__ == "__main__":
    main()
