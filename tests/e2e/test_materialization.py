"""A job whose tables are materialized while it runs, and then restored from the snapshots."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import (
    OUTPUT,
    Totals,
    WhenStored,
    expected_output,
    expected_state,
    materializations,
    random_input,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)

pytestmark = pytest.mark.e2e


def test_job_goes_on_from_snapshots(
    spark: SparkSession,
    make_backend: Callable[..., ChangelogStateBackend],
    tmp_path: Path,
    local_dir: Path,
    always_materialized: None,
) -> None:
    """I13, I14: without tables and sidecar a job resumes from snapshots and log, also at another parallelism."""
    files = random_input(seed=13, batches=9, rows=200, keys=40)
    collected, backend = WhenStored(local_dir), make_backend()
    for upto, parallelism in ((6, 2), (7, 2), (9, 3)):
        write_input(tmp_path / "in", files[:upto])
        result = backend.transform_with_state(
            read_input(spark, tmp_path / "in").groupBy("k"),
            statefulProcessor=Totals(),
            outputStructType=OUTPUT,
            outputMode="Update",
            timeMode="None",
            parallelism=parallelism,
        )
        run_to_end(result.writeStream, tmp_path / "chk", collected)
        assert len(materializations(backend.settings.storage)) >= 2
        shutil.rmtree(Path(backend.settings.local_dir) / "tables")
        os.kill(int(Path(backend.auto_started_sidecar.pid_path).read_text()), signal.SIGKILL)

    assert collected.batches == expected_output(files)
    assert stored_totals(backend.settings.storage, "job") == expected_state(files)
