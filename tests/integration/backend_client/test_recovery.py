"""
Jobs with real tables and a real sidecar process, which is killed, reconfigured and rescaled between their batches.

Only the newest checkpoint is kept, and subsumed data are deleted at once, so no object remains by chance. A failure
means that a table restored afterwards differs from the log (I14), or that a savepoint lost something (I11).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstl_service.formats.manifest import COMPLETE_EVERY
from dstl_service.wire import CheckpointRef
from tests.integration.backend_client.materializing_job import MaterializingJob, running_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NEWEST_ONLY = {
    "DSTL_RETENTION_CHECKPOINTS_MAX": "1",
    "DSTL_RETENTION_DELAY_S": "0",
    "DSTL_COMPACTION_FLOOR_BYTES": "1",
    "DSTL_COMPACTION_LOG_RATIO_MAX": "0.1",
}
APART_S = 0.1


def switches(*, materialization: bool, compaction: bool) -> dict[str, str]:
    """Return the environment that enables or disables the ways of replacing the log."""
    return {
        "DSTL_MATERIALIZATION_ENABLED": str(materialization).lower(),
        "DSTL_COMPACTION_ENABLED": str(compaction).lower(),
    }


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MaterializingJob]:
    """Return a job whose sidecar neither materializes nor compacts."""
    with running_job(tmp_path, NEWEST_ONLY | switches(materialization=False, compaction=False)) as running:
        yield running


def work(job: MaterializingJob, *, materialization: bool, compaction: bool) -> None:
    """Execute batches until the enabled ways have replaced some of the log."""
    known = {handle.uid for handle in job.view().materializations} if job.base else set()
    for _ in range(3):
        job.batch()
    if materialization:
        job.batches_until(
            lambda: len({handle.uid for handle in job.view().materializations} - known) >= job.parallelism,
            "a materialization of every table",
            apart_s=APART_S,
        )
    if compaction:
        job.batches_until(lambda: job.metric("dstl_compactions_total"), "a compaction", apart_s=APART_S)
    job.batch()


def test_log_is_replaced_now_one_way_now_another(job: MaterializingJob) -> None:
    """I11, I14: however materialization, compaction and parallelism change, new tables and savepoints are correct."""
    saved: dict[str, tuple[CheckpointRef | None, dict[bytes, bytes]]] = {}
    phases = [(False, False, 2), (True, False, 3), (False, True, 1), (True, True, 2), (False, False, 2)]
    for number, (materialization, compaction, parallelism) in enumerate(phases):
        job.sidecar.restart(**switches(materialization=materialization, compaction=compaction))
        job.parallelism = parallelism
        work(job, materialization=materialization, compaction=compaction)
        name = f"phase-{number}"
        job.save(name)
        saved[name] = job.base, dict(job.state)

        assert job.restored(parallelism + 1, name) == job.state

    assert job.view().materializations
    for name, (job.base, job.state) in saved.items():
        assert job.restored(2, f"saved-{name}") == job.state


def test_long_log_crosses_complete_manifests(job: MaterializingJob) -> None:
    """A cold start after more than twenty checkpoints reads a complete manifest and the later ones."""
    for _ in range(COMPLETE_EVERY + 2):
        job.batch(keys=10)
    job.sidecar.restart()
    job.batch(keys=10)

    assert job.base is not None
    assert COMPLETE_EVERY < job.base.id < 2 * COMPLETE_EVERY
    assert job.restored(3, "cold") == job.state


def test_job_is_rescaled_in_and_out(job: MaterializingJob) -> None:
    """I14: from six partitions to four and back, with values of 1 kB, tables equal the logged changes."""
    job.sidecar.restart(**switches(materialization=True, compaction=True))
    for number, parallelism in enumerate((6, 4, 6)):
        job.parallelism = parallelism
        for _ in range(4):
            job.batch(keys=30, value_bytes=1000)
        job.batches_until(
            lambda: len(job.view().materializations) >= job.parallelism,
            "materializations of all tables",
            apart_s=APART_S,
        )

        assert job.restored(parallelism, f"same-{number}") == job.state
        assert job.restored(5, f"other-{number}") == job.state


def test_random_splits_from_8_to_12_to_5(job: MaterializingJob) -> None:
    """I14: in eight changes, with snapshots of random tables at random moments, every key is there once."""
    job.sidecar.restart(**switches(materialization=True, compaction=True))
    chance = random.Random(13)
    for turn in range(3):
        job.parallelism = 8
        job.batches_until(
            lambda: job.base and job.view().materializations, "a materialization", apart_s=APART_S, keys=6
        )
        for parallelism in (8, 12, 5):
            job.parallelism = parallelism
            share = chance.random()
            for _ in range(chance.randint(1, 3)):
                job.batch(keys=chance.randint(1, 12), report=lambda _: chance.random() < share)  # noqa: B023
            folder = f"{turn}-{parallelism}"
            assert job.restored({8: 12, 12: 5, 5: 8}[parallelism], folder) == job.state, (turn, parallelism)
            shutil.rmtree(job.folder / folder)


@pytest.mark.parametrize("materialization", [False, True])
def test_state_survives_repeated_kills(job: MaterializingJob, materialization: bool) -> None:
    """I5, I14, I16: a job killed twice resumes; its tables get the difference, new ones get snapshots and log."""
    job.sidecar.restart(**switches(materialization=materialization, compaction=False))
    job.parallelism = 1
    for number in range(2):
        work(job, materialization=materialization, compaction=False)
        job.sidecar.restart(**switches(materialization=materialization, compaction=False))

        assert job.restored(1, f"after-{number}") == job.state
        job.batch(keys=40)
        assert job.advances[-1].changes <= 45  # the changes and deletions of one batch, not the whole state
    assert len(job.state) > 200
