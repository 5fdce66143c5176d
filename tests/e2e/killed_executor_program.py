"""
Kills an executor with the table of a partition while a query defers rows, then the driver's query, on a cluster of two.

``python -m tests.e2e.killed_executor_program --folder FOLDER --local-dir DIR``; an error means that batches waited for
the restore. Output and state are left in the file `END`, with the number of batches.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.failover_jobs import Run, random_rows, sessions
from tests.e2e.gated_service import GatedService
from tests.e2e.hung_executor_program import executors
from tests.e2e.local_cluster import run_on_cluster

FILES = random_rows(seed=71, batches=200, rows=60, keys=30)
END = "end.pickle"


def run(spark: SparkSession, folder: Path, local_dir: Path) -> None:
    """Run the query, and stall it."""
    gate = GatedService(f"file://{folder / 'store'}", local_dir, 64, {})
    with gate.running():

        def backend() -> ChangelogStateBackend:
            return ChangelogStateBackend(
                f"file://{folder / 'store'}",
                job="job",
                local_dir=str(local_dir),
                service=gate.address,
                parallelism=2,
                failover="deferred",
                failover_patience_s=3.0,
            )

        stalling = Run(spark, folder, backend(), sessions, FILES)
        stalling.batch()
        stalling.steady()
        stalling.stall(gate)
        executors()[0].kill()
        assert [stalling.batch().rows_waiting > 0 for _ in range(2)] == [True] * 2
        stalling.recover(gate)
        stalling.stall(gate)
        executors()[-1].kill()
        assert stalling.batch().rows_waiting > 0
        gate.open()
        stalling.start(backend())
        assert stalling.batch().rows_waiting == 0
        stalling.batch()
        (folder / END).write_bytes(pickle.dumps((stalling.written, stalling.end())))


if __name__ == "__main__":
    run_on_cluster(run, 2, {"spark.shuffle.reduceLocality.enabled": "false", "spark.locality.wait": "500ms"})
