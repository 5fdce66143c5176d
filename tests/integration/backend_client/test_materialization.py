"""
Materialization with a real sidecar process and real tables: created, killed, repeated, restored from (I13).

A failure means that a snapshot cost a checkpoint, or that a table restored from one differs from the log's own result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_client.service.partition_table import TablePreparation
from backend_client.settings import BackendSettings
from dstl_service.formats.manifest import ManifestKind
from storage.errors import CorruptDataError
from storage.key_groups import key_group_range
from tests.integration.backend_client.materializing_job import (
    MAX_PARALLELISM,
    MaterializingJob,
    report_none,
    running_job,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SLOW = {"DSTL_MATERIALIZATION_BANDWIDTH_BYTES_PER_S": "1000", "DSTL_MATERIALIZATION_THREADS": "1"}


def flip(path: Path, data: bytearray) -> None:
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = (flip, lambda path, data: path.write_bytes(data[:-1]), lambda path, _: path.unlink())


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MaterializingJob]:
    """Return a job whose sidecar requests a snapshot whenever it can."""
    with running_job(tmp_path) as running:
        yield running


def materialized(job: MaterializingJob, count: int = 2) -> bool:
    """Return whether the newest state has materializations of this many tables."""
    return job.base is not None and len(job.view().materializations) >= count


def test_state_is_restored_from_snapshots_and_log(job: MaterializingJob) -> None:
    """I13, I14: after a materialization the earlier log is no longer in the state, and restored tables are equal."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    for _ in range(3):
        job.batch(report=report_none)
    view = job.view()

    assert min(handle.entry.id.checkpoint_id for handle in view.log) > min(
        handle.checkpoint_id for handle in view.materializations
    )
    assert job.restored(2, "same") == job.state
    assert job.metric("dstl_materializations_completed_total") >= 2
    assert job.metric("dstl_materializations_failed_total") == 0


def test_rescaled_tables_copy_their_key_groups(job: MaterializingJob) -> None:
    """I14: tables of another parallelism copy their own key groups from each snapshot that holds some."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    job.batch(report=report_none)

    for parallelism in (1, 3, 4):
        assert job.restored(parallelism, f"other-{parallelism}") == job.state


def test_large_files_are_shared_with_the_sidecar(tmp_path: Path) -> None:
    """I14: large files of a snapshot are the sidecar's downloads themselves; damaged ones only cost time (I16)."""
    downloads = tmp_path / "downloads"
    with running_job(tmp_path, {"DSTL_CACHE_FOLDER": str(downloads)}) as job:
        large = {"keys": 90, "value_bytes": 60_000}
        job.batches_until(lambda: len([*job.objects("*-???????.sst")]) >= 2, "files of megabytes", **large)
        job.batches_until(lambda: len(job.view().materializations) == 2, "a materialization of both tables")
        for parallelism in (2, 3, 1):
            assert job.restored(parallelism, f"first-{parallelism}") == job.state

        kept = [path for path in downloads.rglob("part-*/*") if path.stat().st_size > 4 << 20]
        linked = {path.stat().st_ino for path in (tmp_path / "first-2").rglob("*.sst")}
        assert kept
        assert {path.stat().st_ino for path in kept} <= linked
        for path in kept:
            data = bytearray(path.read_bytes())
            path.unlink()  # the tables keep theirs
            flip(path, data)
        assert job.client.takes_files
        assert job.restored(2, "again") == job.state
        assert not job.client.takes_files


def test_prepared_tables_hand_their_snapshots_over(job: MaterializingJob, tmp_path: Path) -> None:
    """A table that is prepared beside the batches answers the request for a snapshot, which is not repeated soon."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    job.batch(report=report_none)
    storage = (tmp_path / "store").as_uri()
    settings = BackendSettings(storage, "job", service=job.sidecar.address, local_dir=str(tmp_path / "prepared"))
    ranges = tuple(key_group_range(partition, 3, MAX_PARALLELISM) for partition in range(3))
    base = job.base
    assert base is not None
    before = job.metric("dstl_materializations_triggered_total")
    indexes = pa.RecordBatch.from_arrays([pa.array(range(3))], ["at"])
    prepared = pa.Table.from_batches(TablePreparation(settings, "uid", "op", ranges, base)([indexes]))

    assert prepared.num_rows == 3
    assert all(seconds > 0 for seconds in prepared["seconds"].to_pylist())
    assert job.metric("dstl_materializations_triggered_total") > before
    assert job.metric("dstl_materializations_started_total") == job.metric("dstl_materializations_triggered_total")

    job.parallelism = 3
    wanted = {key_groups.to_text() for key_groups in ranges}
    stored = "snapshots of the prepared tables"
    job.batches_until(lambda: wanted <= {item.key_groups.to_text() for item in job.view().materializations}, stored)
    assert job.restored(3, "after") == job.state
    assert job.metric("dstl_materializations_failed_total") == 0


def test_rescaled_job_replaces_old_snapshots(job: MaterializingJob) -> None:
    """I14: while a new parallelism is partly materialized, old snapshots, new ones and log are consistent."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    job.parallelism = 3
    middle = key_group_range(1, 3, MAX_PARALLELISM).to_text()

    def ranges() -> list[str]:
        return [handle.key_groups.to_text() for handle in job.view().materializations]

    job.batches_until(
        lambda: middle in ranges(), "a materialization of the middle", report=lambda data: data["key_groups"] == middle
    )
    assert ranges() == ["00000-00063", middle, "00064-00127"]
    for parallelism in (2, 3, 4):
        assert job.restored(parallelism, f"mixed-{parallelism}") == job.state

    job.batches_until(
        lambda: not {"00000-00063", "00064-00127"} & {*ranges()}, "new materializations of all key groups"
    )
    assert len(ranges()) == 3
    for parallelism in (2, 3):
        assert job.restored(parallelism, f"new-{parallelism}") == job.state


def test_compacted_log_fits_snapshots(tmp_path: Path) -> None:
    """I14: with continuous compaction of the log between materializations, restored tables are equal."""
    compacting = {"DSTL_COMPACTION_ENABLED": "true", "DSTL_COMPACTION_FLOOR_BYTES": "1"}
    with running_job(tmp_path, compacting) as job:
        job.batches_until(lambda: job.metric("dstl_compactions_total"), "a compaction", report=report_none)
        for number in range(4):
            done = job.metric("dstl_compactions_total")
            # While snapshots are not reported, the log grows until it is compacted; a snapshot then follows it.
            job.batches_until(
                lambda: job.metric("dstl_compactions_total") > done,  # noqa: B023
                "a compaction",
                report=report_none,
            )
            job.batches_until(lambda: materialized(job, 1), "a materialization")
            assert job.restored(2 + number % 2, f"restored-{number}") == job.state


def test_second_snapshot_uploads_new_files_only(job: MaterializingJob) -> None:
    """Two snapshots of one table share the objects of their common files."""
    job.batch(keys=3000)
    job.batches_until(lambda: materialized(job), "a materialization of both tables", keys=5)
    first, uploaded = job.objects("*.sst"), job.metric("dstl_materialization_uploaded_bytes_total")
    uids = {handle.uid for handle in job.view().materializations}
    job.batches_until(
        lambda: not uids & {handle.uid for handle in job.view().materializations}, "a second materialization", keys=5
    )

    assert job.metric("dstl_materialization_reused_bytes_total") > uploaded / 2
    assert first & job.objects("*.sst")
    assert job.restored(2, "same") == job.state


def test_damaged_table_enters_no_snapshot(job: MaterializingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """I10: a bit that flips on the local disk before a snapshot is stored costs the table, which is restored again."""
    chance, post, damaged = random.Random(5), job.client.post, list[str]()

    def damaging(path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        if path.endswith("/materializations") and chance.random() < 0.5:
            file = chance.choice(sorted(Path(body["path"]).iterdir()))
            data = bytearray(file.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)  # in place: the table shares an SST file
            damaged.append(file.name)
        answer: dict[str, Any] = post(path, body, **options)
        return answer

    monkeypatch.setattr(job.client, "post", damaging)
    for number in range(2):
        seen = len(damaged)
        job.batches_until(lambda: len(damaged) > seen, "damage")  # noqa: B023
        uids = {handle.uid for handle in job.view().materializations}
        job.batches_until(
            lambda: {handle.uid for handle in job.view().materializations} - uids,  # noqa: B023
            "a further materialization",
        )
        assert job.restored(1 + number % 2, f"restored-{number}") == job.state

    assert job.restored(2, "tables") == job.state
    assert job.metric("dstl_tables_damaged_total") >= 1
    assert "a damaged local table will be restored" in job.sidecar.log()


@pytest.mark.parametrize("moment", ["file", "stored"])
def test_killed_service_costs_only_the_snapshot(tmp_path: Path, moment: str) -> None:
    """I13: a sidecar killed while it stores a snapshot costs that snapshot; checkpoints and later snapshots succeed."""
    with running_job(tmp_path, {} if moment == "stored" else SLOW) as job:
        job.batch(keys=400)
        seen = {"file": "*.sst", "stored": "*.json"}[moment]
        job.batches_until(lambda: job.objects(seen), "a snapshot on its way", report=report_none)
        if moment == "stored":
            job.batches_until(lambda: "materialization stored" in job.sidecar.log(), "a stored one", report=report_none)
        job.sidecar.restart(DSTL_MATERIALIZATION_BANDWIDTH_BYTES_PER_S="0")

        job.batches_until(lambda: materialized(job), "a materialization after the restart")

        assert job.restored(2, "same") == job.state
        job.batches_until(lambda: not job.snapshots_left(), "the removal of the killed process's leftovers")


def test_failing_uploads_fail_no_checkpoint(tmp_path: Path) -> None:
    """I13: while no snapshot can be stored, checkpoints succeed and failures are reported; then one is stored."""
    (tmp_path / "store" / "job").mkdir(parents=True)
    blocker = tmp_path / "store" / "job" / "materialized"
    blocker.write_text("a file where the folder should be")
    with running_job(tmp_path) as job:
        job.batches_until(
            lambda: job.metric("dstl_materialization_failures_reported_total") >= 1, "three failures in a row"
        )
        assert job.metric("dstl_materialization_consecutive_failures") >= 3
        assert job.metric("dstl_materializations_completed_total") == 0
        assert "materialization keeps failing" in job.sidecar.log()
        blocker.unlink()

        job.batches_until(lambda: materialized(job), "a materialization after the storage is restored")

        assert job.metric("dstl_materialization_consecutive_failures") == 0
        assert job.restored(2, "same") == job.state


def test_slow_upload_holds_up_no_checkpoint(tmp_path: Path) -> None:
    """I13: during a slow upload of a snapshot, batches complete; snapshots due meanwhile count as skipped."""
    with running_job(tmp_path, SLOW, parallelism=1) as job:
        job.batch(keys=2000)
        job.batches_until(lambda: job.metric("dstl_materializations_running"), "a running snapshot")
        job.batches_until(lambda: job.metric("dstl_materializations_skipped_total"), "a skipped one")

        assert job.metric("dstl_materializations_running") == 1
        assert job.metric("dstl_materialization_running_seconds") > 0
        assert job.metric("dstl_materializations_completed_total") == 0
        assert job.metric("dstl_materializations_started_total") == 1


def test_damaged_object_is_named(job: MaterializingJob) -> None:
    """I10: for a damaged, truncated or missing object of a snapshot, the error names it; no table gets a version."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    handles = job.view().materializations
    named = {file.object_key for handle in handles for file in job.index(handle).files}
    named |= {handle.index_key for handle in handles}

    for number, (key, damage) in enumerate((key, damage) for key in sorted(named) for damage in DAMAGES):
        path = job.folder / "store" / key
        whole = path.read_bytes()
        damage(path, bytearray(whole))
        with pytest.raises(CorruptDataError, match=re.escape(key)):
            job.restored(2, f"damaged-{number}")
        path.write_bytes(whole)

    assert job.restored(2, "mended") == job.state


def test_complete_manifest_takes_materialization_in(job: MaterializingJob) -> None:
    """A materialization enters through a complete manifest, and later complete manifests keep it."""
    job.batches_until(lambda: materialized(job), "a materialization of both tables")
    uids = {handle.uid for handle in job.view().materializations}
    while job.base is None or job.base.id % 20:
        job.batch(report=report_none)
    answer = job.client.get(f"/v1/jobs/job/checkpoints/{job.base.id}")

    assert answer["kind"] == ManifestKind.COMPLETE
    assert {handle.uid for handle in job.view().materializations} == uids
