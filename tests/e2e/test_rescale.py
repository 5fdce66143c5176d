"""Operators change their parallelism while their query runs, on a cluster whose partitions are pinned to executors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from backend_client import ChangelogStateBackend
from tests.e2e.support import (
    Collected,
    expected_output,
    random_input,
    read_input,
    run_to_end,
    write_input,
)
from tests.e2e.test_chaos import Rows
from tests.e2e.test_job import transform
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e


def test_running_query_is_rescaled(tmp_path: Path, local_dir: Path) -> None:
    """I2, I14: 2 -> 3 -> 1 -> 2 partitions without a stop: every key's rows are processed once, with its state."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "tests.e2e.rescale_program", "--folder", str(tmp_path)]

    subprocess.run([*command, "--local-dir", str(local_dir)], cwd=tmp_path, env=environment, check=True, timeout=400)


def test_slow_batches_get_more_partitions(
    spark: SparkSession, tmp_path: Path, make_backend: Callable[..., ChangelogStateBackend]
) -> None:
    """I14: where batches take too long, operators get more partitions, and keep them over a restart."""
    every, collected, fed = random_input(seed=71, batches=200, rows=40, keys=9), Collected(), list[Rows]()
    seen: list[dict[str, int]] = []

    def query(autoscale_batch_ms: float | None = None) -> tuple[ChangelogStateBackend, Any]:
        backend = make_backend(parallelism=1, autoscale_max=2, autoscale_batch_ms=autoscale_batch_ms)
        return backend, transform(backend, read_input(spark, tmp_path / "in")).writeStream

    def is_scaled_after_another_file() -> bool:
        fed.append(every[len(fed)])
        write_input(tmp_path / "in", fed)
        wait_until(lambda: len(collected.batches) == len(fed), what="the batch")
        return backend.parallelism() == {"Totals": 2}

    write_input(tmp_path / "in", [])
    backend, writer = query(autoscale_batch_ms=0.001)
    running = writer.option("checkpointLocation", str(tmp_path / "chk")).foreachBatch(collected).start()
    try:
        wait_until(is_scaled_after_another_file, what="more partitions")
    finally:
        running.stop()
    again, writer = query(autoscale_batch_ms=60_000.0)
    write_input(tmp_path / "in", [*fed, every[-1]])

    def keep(batch: DataFrame, batch_id: int) -> None:
        seen.append(again.parallelism())
        collected(batch, batch_id)

    run_to_end(writer, tmp_path / "chk", keep)

    assert seen == [{"Totals": 2}]
    assert collected.batches == expected_output([*fed, every[-1]])
