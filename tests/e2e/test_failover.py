"""
Partitions whose tables are being restored: their rows wait, the others do not.

A test deletes a partition's table between two batches, and a gate in front of the sidecar holds its restore. Output and
state are compared with those of a run without any of this, over the same rows.
A failure means that rows are lost, run twice or out of order, or that everybody waits.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from backend_client import ChangelogStateBackend
from dstl_service.cli import main as dstl
from storage.errors import InvalidInputError
from tests.e2e.conftest import folder_of_sidecars
from tests.e2e.failover_jobs import (
    Build,
    End,
    Run,
    Undisturbed,
    chain,
    sessions,
    stalls,
    totals,
    windows,
)
from tests.e2e.gated_service import GatedService
from tests.e2e.killed_executor_program import END, FILES
from tests.e2e.support import stored_state
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def gate(tmp_path: Path, local_dir: Path) -> Iterator[GatedService]:
    """A service whose restores of the second partition can be held."""
    settings = {"DSTL_RETENTION_CHECKPOINTS_MAX": "3", "DSTL_RETENTION_DELAY_S": "0"}
    with GatedService(f"file://{tmp_path / 'store'}", local_dir, 64, settings).running() as gate:
        yield gate


Make = Callable[..., ChangelogStateBackend]
Compared = Callable[[Build, int], End]


@pytest.fixture
def backend(make_backend: Make, gate: GatedService) -> Make:
    """Return a function that makes backends of the gated service."""

    def make(**options: Any) -> ChangelogStateBackend:
        return make_backend(service=gate.address, **{"failover": "deferred", "failover_patience_s": 3.0, **options})

    return make


@pytest.fixture(scope="module")
def undisturbed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    """Return a function that returns output and state of a query after so many batches without a stall."""
    with ExitStack() as stack:

        @cache
        def runs(build: Build) -> Undisturbed:
            folder, local_dir = tmp_path_factory.mktemp("undisturbed"), stack.enter_context(folder_of_sidecars())
            return Undisturbed(spark, folder, local_dir, build, FILES)

        yield lambda build, batches: runs(build).after(batches)


@pytest.mark.parametrize("build", [sessions, windows, totals])
def test_deferred_rows_run_when_the_table_is_there(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
    undisturbed: Compared,
    build: Build,
) -> None:
    """I14: rows and time wait over several batches, then run in order and as of their arrival; others are on time."""
    run = Run(spark, tmp_path, backend(), build, FILES)
    run.steady()
    run.stall(gate)
    first = run.written
    waiting = [run.batch().rows_waiting for _ in range(3)]
    added = [sum(rows) for rows in stalls(spark, FILES[first : run.written])]
    if build is totals:
        assert waiting == [sum(added[: number + 1]) for number in range(3)]
    assert waiting == sorted(set(waiting)), "each batch adds rows, and ends without the table"
    run.recover(gate)
    run.batch()

    assert run.end() == undisturbed(run.build, run.written)
    assert gate.held >= 2, "a task's and the one beside the batches"


def test_new_driver_runs_first_what_waits(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
    undisturbed: Compared,
) -> None:
    """
    I14: the rows survive the driver, and run in the next one's first batch, with another number of partitions.

    Drivers with the same number start again in `killed_executor_program`.
    """
    run = Run(spark, tmp_path, backend(), sessions, FILES)
    run.steady()
    run.stall(gate)
    assert [run.batch().rows_waiting > 0 for _ in range(2)] == [True] * 2
    gate.open()
    run.start(backend(parallelism=3))

    assert run.batch().rows_waiting == 0
    run.batch()
    assert run.end() == undisturbed(run.build, run.written)


def test_rewind_brings_waiting_rows_back(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
    undisturbed: Compared,
) -> None:
    """After a rewind to a checkpoint in which rows waited, these run, though they had run once before."""
    run = Run(spark, tmp_path, backend(), totals, FILES)
    run.steady()
    run.stall(gate)
    assert [run.batch().rows_waiting > 0 for _ in range(2)] == [True] * 2
    storage = run.backend.settings.storage
    assert dstl(["savepoints", "--storage", storage, "--create", "stalled", "job"]) == 0
    run.recover(gate)
    run.batch()
    assert run.query is not None
    run.query.stop()
    assert dstl(["rewind", "--storage", storage, "--savepoint", "stalled", "--write", "job"]) == 0
    run.start(backend())
    run.batch()

    # Spark's file source reads files that it had read before the rewind in one batch, so the output is another.
    assert run.end()[1] == undisturbed(run.build, run.written)[1]
    assert dstl(["fsck", "--storage", storage, "job"]) == 0


def test_changed_operators_run_what_waits(
    spark: SparkSession, tmp_path: Path, backend: Make, gate: GatedService
) -> None:
    """
    I14: rows wait for operators that get other names meanwhile, and in a fork made then; with one they are not removed.

    The fork begins while they wait in the parent, and loses an operator when they have run.
    """
    run = Run(spark, tmp_path, backend(standby_replicas=1), chain("a", "b"), FILES)
    undisturbed = Run(spark, tmp_path / "other", backend(job="other", failover="exact"), chain("a", "b"), FILES)
    run.steady()
    run.stall(gate)
    assert [run.batch().rows_waiting > 0 for _ in range(2)] == [True] * 2
    storage = run.backend.settings.storage
    assert dstl(["savepoints", "--storage", storage, "--create", "waiting", "job"]) == 0

    def restart(*names: str, **options: Any) -> None:
        run.build = chain(*names)
        run.start(backend(**options))

    def check(job: str, *tables: str) -> None:
        """Compare the state of tables with that of an undisturbed run of as many batches."""
        while undisturbed.written < run.written:
            undisturbed.batch()
        for table in tables:
            assert stored_state(storage, job, table) == stored_state(storage, "other", table)

    with pytest.raises(InvalidInputError, match="rows of operator 'b' wait in the log"):
        restart("first", renamed={"a": "first"}, removed=("b",))
    gate.open()
    renamed = {"a": "first", "b": "second"}
    restart("first", "second", "third", renamed=renamed, parallelism=3)
    assert run.batch().rows_waiting == 0
    check("job", "a", "b")

    parent = {"fork_of": "job", "fork_at": "waiting", "fork_location": str(tmp_path / run.checkpoint)}
    run.checkpoint = "of-the-fork"
    restart("a", "second", job="fork", renamed={"b": "second"}, **parent)
    run.batch()
    check("fork", "a", "b")
    restart("second", job="fork", renamed={"b": "second"}, removed=("a",))
    assert run.batch().rows_waiting == 0
    assert run.query is not None
    run.query.stop()
    assert dstl(["fsck", "--storage", storage, "fork"]) == 0


def test_exact_batch_waits_for_partitions_with_rows_only(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
) -> None:
    """By default a batch waits for a table that has to be restored, but not for one of a partition without rows."""
    others = [row for row, is_stalled in zip(FILES[2], stalls(spark, FILES[2:3])[0], strict=True) if not is_stalled]
    files = [FILES[0], FILES[1], others, *FILES[3:20]]
    run = Run(spark, tmp_path, backend(failover="exact"), totals, files)
    run.batch()
    run.steady()
    run.stall(gate)
    assert run.batch().rows == len(others)
    wait_until(lambda: gate.held == 2, what="a restore beside the batches, after that of the task")
    done = len(run.progress)
    run.write()
    wait_until(lambda: gate.held == 3, what="a task that waits for its table")
    assert len(run.progress) == done
    gate.open()
    run.batch()

    undisturbed = Run(spark, tmp_path / "other", backend(job="other", failover="exact"), totals, files)
    for _ in range(run.written):
        undisturbed.batch()
    assert run.end() == undisturbed.end()


@pytest.mark.parametrize("limit", [{"max_stall_s": 2.0}, {"max_deferred_bytes": 1}])
def test_batch_waits_beyond_the_limits(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
    undisturbed: Compared,
    limit: dict[str, Any],
) -> None:
    """
    After the longest stall, or beyond the bytes allowed, a batch waits for the table, and runs what waits.

    A query that waits so can be stopped.
    """
    run = Run(spark, tmp_path, backend(**limit), totals, FILES)
    run.steady()
    run.stall(gate)

    def waits() -> bool:
        """Let batches come until one waits for the table."""
        done = len(run.progress)
        run.write()
        try:
            wait_until(lambda: len(run.progress) > done, what="a batch", timeout_s=15)
        except AssertionError:
            return True
        return False

    assert any(waits() for _ in range(20))
    assert run.query is not None
    stopping = threading.Thread(target=run.query.stop, daemon=True)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive()
    gate.open()
    run.start(backend(**limit))
    assert run.batch().rows_waiting == 0
    assert run.end() == undisturbed(run.build, run.written)


def test_killed_executor_stalls_its_partitions_only(tmp_path: Path, local_dir: Path, undisturbed: Compared) -> None:
    """I14: on a cluster, with executors that are killed and a driver that starts again, deferred rows run once."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "tests.e2e.killed_executor_program", "--folder", str(tmp_path)]

    subprocess.run([*command, "--local-dir", str(local_dir)], cwd=tmp_path, env=environment, check=True, timeout=280)

    batches, end = pickle.loads((tmp_path / END).read_bytes())
    assert end == undisturbed(sessions, batches)


@pytest.mark.parametrize("build", [sessions, totals])
def test_lost_rows_are_those_listed(
    spark: SparkSession,
    tmp_path: Path,
    backend: Make,
    gate: GatedService,
    undisturbed: Compared,
    capsys: pytest.CaptureFixture[str],
    build: Build,
) -> None:
    """I17: the result is that of a run without the listed rows; a start that asks for it runs them, as of arrival."""
    mode = {"failover": "bounded-loss", "max_lost_fraction": 0.9}
    run = Run(spark, tmp_path, backend(**mode), build, FILES)
    run.steady()
    run.stall(gate)
    lost = {batch.batch_id: batch.rows_lost for batch in (run.batch(), run.batch())}
    gate.open()
    wait_until(lambda: run.batch().rows_lost == 0, what="a batch without losses")
    run.batch()
    assert run.query is not None
    run.query.stop()
    storage = run.backend.settings.storage
    capsys.readouterr()
    assert dstl(["losses", "--storage", storage, "job"]) == 0
    listed = [dict(part.split("=") for part in line.split("  ")) for line in capsys.readouterr().out.splitlines()]
    batches = {int(entry["batch"]): int(entry["rows"]) for entry in listed}
    assert lost.items() <= batches.items()
    assert min(lost.values()) > 0
    assert {entry["partition"] for entry in listed} == {"1"}

    without = Run(
        spark, tmp_path / "without", backend(job="without", failover="exact"), build, _without(spark, batches)
    )
    for _ in range(run.written):
        without.batch()
    assert run.end() == without.end()
    run.start(backend(**mode, lost_rows="replay"))
    again = run.batch()
    assert again.rows + again.late_rows - sum(batches.values()) == len(FILES[run.written - 1])
    assert dstl(["losses", "--storage", storage, "job"]) == 0
    assert capsys.readouterr().out == ""
    if build is totals:  # sums do not depend on the order of their rows
        assert run.end()[1] == undisturbed(run.build, run.written)[1]


def _without(spark: SparkSession, batches: dict[int, int]) -> list[list[tuple[str, float, int]]]:
    """Return the rows without those of the stalled partition in these batches; the watermark moves as with them."""
    left = []
    stalled = stalls(spark, FILES)
    for number, rows in enumerate(FILES):
        if number in batches:
            rows = [row for row, is_stalled in zip(rows, stalled[number], strict=True) if not is_stalled]  # noqa: PLW2901
            assert max(at for _, _, at in rows) == max(at for _, _, at in FILES[number])
        left.append(rows)
    return left
