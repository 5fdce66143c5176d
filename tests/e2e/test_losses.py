"""
Losses other than processes: the registry, and the local disk.

A failure means that stored state is lost, or that a local disk is more than a cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from dstl_service.repair.fsck import check_job
from dstl_service.repair.rebuild import rebuild_registry
from storage.clock import SystemClock, SystemIds
from storage.open import open_store
from tests.e2e.support import (
    OUTPUT,
    Collected,
    Totals,
    expected_output,
    expected_state,
    random_input,
    read_input,
    run_to_end,
    stored_totals,
    write_input,
)
from tests.support.machine import fill, small_disk

pytestmark = pytest.mark.e2e

FILES = random_input(seed=30, batches=4, rows=60, keys=12)


def run(
    backend: ChangelogStateBackend, spark: SparkSession, folder: Path, files: int, function: Callable[..., None]
) -> None:
    """Run a query over the first files, from its current position to their end."""
    write_input(folder / "in", FILES[:files])
    stream = read_input(spark, folder / "in").groupBy("k")
    query = backend.transform_with_state(stream, Totals(), OUTPUT, "Update", "None")
    run_to_end(query.writeStream, folder / "chk", function)


def test_query_continues_after_rebuild(
    make_backend: Callable[..., ChangelogStateBackend], spark: SparkSession, tmp_path: Path
) -> None:
    """I10, I14: a job that lost its registry and all tables is rebuilt from its log, and continues unaffected."""
    collected = Collected()
    run(make_backend(), spark, tmp_path, 2, collected)
    job, store = tmp_path / "store" / "job", open_store(f"file://{tmp_path / 'store'}")
    for name in ("epochs", "checkpoints"):
        shutil.rmtree(job / name)
    (job / "job.json").unlink()
    shutil.rmtree(Path(make_backend().settings.host_folder) / "tables")
    report = rebuild_registry(store, "job", SystemClock(), SystemIds(), write=True)
    assert (report.checkpoint.split(".")[0], report.is_proven, report.lost) == ("1", False, [])

    run(make_backend(parallelism=3), spark, tmp_path, 4, collected)
    assert collected.batches == expected_output(FILES)
    assert stored_totals(store, "job") == expected_state(FILES)
    assert check_job(store, "job").problems == []


def test_full_local_disk_only_slows(
    make_backend: Callable[..., ChangelogStateBackend], spark: SparkSession, tmp_path: Path, local_dir: Path
) -> None:
    """I16: a full local disk costs no batch and no checkpoint; once it has room again, tables return."""
    collected = Collected()
    run(make_backend(), spark, tmp_path, 1, collected)
    shutil.rmtree(local_dir / "tables")
    with small_disk(local_dir / "tables", 1 << 20) as disk:
        fill(disk)
        run(make_backend(), spark, tmp_path, 3, collected)
        assert not list(disk.rglob("CURRENT"))
    run(make_backend(), spark, tmp_path, 4, collected)

    assert list((local_dir / "tables").rglob("CURRENT"))
    assert collected.batches == expected_output(FILES)
    assert stored_totals(f"file://{tmp_path / 'store'}", "job") == expected_state(FILES)
