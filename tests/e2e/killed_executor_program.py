"""
Kills an executor with the table of a partition while a query defers rows, then the driver's query, on a cluster of two.

``python -m tests.e2e.killed_executor_program --folder FOLDER --local-dir DIR``; an error means that batches waited for
the restore, or that output or state is wrong.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.failover_jobs import Run, random_rows, sessions
from tests.e2e.gated_service import GatedService
from tests.e2e.hung_executor_program import executors
from tests.e2e.local_cluster import run_on_cluster

FILES = random_rows(seed=72, batches=60, rows=100, keys=40)


def run(spark: SparkSession, folder: Path, local_dir: Path) -> None:
    """Run the query, stall it, and compare it with a run in which nothing happens."""
    gate = GatedService(f"file://{folder / 'store'}", local_dir, 64, {})
    with gate.running():

        def backend(job: str) -> ChangelogStateBackend:
            return ChangelogStateBackend(
                f"file://{folder / 'store'}",
                job=job,
                local_dir=str(local_dir),
                service=gate.address,
                parallelism=2,
                failover="deferred",
                failover_patience_s=3.0,
            )

        stalling = Run(spark, folder, backend("job"), sessions, FILES)
        stalling.batch()
        stalling.steady()
        stalling.stall(gate)
        executors()[0].kill()
        assert [stalling.batch().rows_waiting > 0 for _ in range(3)] == [True] * 3
        stalling.recover(gate)
        stalling.stall(gate)
        executors()[-1].kill()
        assert stalling.batch().rows_waiting > 0
        gate.open()
        stalling.start(backend("job"))
        assert stalling.batch().rows_waiting == 0
        stalling.batch()

        undisturbed = Run(spark, folder / "other", backend("other"), sessions, FILES)
        for _ in range(stalling.written):
            undisturbed.batch()
        assert stalling.end() == undisturbed.end()


if __name__ == "__main__":
    run_on_cluster(run, 2, {"spark.shuffle.reduceLocality.enabled": "false", "spark.locality.wait": "500ms"})
