"""
Suspends an executor and its Python workers for good while a query runs, on a cluster with the recommended settings.

``python -m tests.e2e.hung_executor_program --folder FOLDER --local-dir DIR``; an error means that the query waited for
the executor, or that its output or state is wrong.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.local_cluster import run_on_cluster
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    expected_state,
    random_input,
    read_input,
    stored_totals,
    write_input,
)
from tests.waiting import wait_until

FILES = random_input(seed=71, batches=5, rows=200, keys=80)
HANGS_AFTER = 2
"""Batches before the executor hangs."""
_GIVEN_UP_S = 90.0
"""Spark alone would give the executor up after 120 s."""


def executors() -> list[psutil.Process]:
    """Return the JVMs of the cluster's executors."""
    return [process for process in psutil.Process().children(recursive=True) if _is_executor(process)]


def _is_executor(process: psutil.Process) -> bool:
    try:
        return any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    except psutil.Error:  # it has just ended
        return False


def run(spark: SparkSession, folder: Path, local_dir: Path) -> None:
    """Run the query; from some batch on, one of two executors hangs."""
    backend = ChangelogStateBackend(f"file://{folder / 'store'}", job="job", local_dir=str(local_dir), parallelism=4)
    assert all(one.is_met for one in backend.recommended_settings(spark))
    collected = Collected()
    write_input(folder / "in", FILES[:HANGS_AFTER])
    stream = read_input(spark, folder / "in")
    result = backend.transform_with_state(stream.groupBy("k"), Totals(), OUTPUT, "Update", "None")
    query = result.writeStream.option("checkpointLocation", str(folder / "chk")).foreachBatch(collected).start()
    query.processAllAvailable()

    executor, *others = executors()
    assert others
    hung = [executor, *executor.children(recursive=True)]
    for process in hung:
        process.suspend()
    try:
        write_input(folder / "in", FILES)
        wait_until(
            lambda: query.exception() is not None or len(collected.batches) == len(FILES),
            timeout_s=_GIVEN_UP_S,
            what="the end of the batches after the executor's last one",
        )
        query.processAllAvailable()
    finally:
        for process in hung:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    query.stop()
    assert collected.batches == expected_output(FILES)
    assert stored_totals(backend.settings.storage, "job") == expected_state(FILES)


if __name__ == "__main__":
    run_on_cluster(run, 2, {one.name: one.value for one in ChangelogStateBackend.recommended_settings()})
