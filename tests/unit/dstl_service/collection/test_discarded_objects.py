"""
The objects deleted when tables are materialized, checkpoints subsumed, and batches given up, seen from outside.

An object is deleted when its changes are materialized *and* no retained checkpoint needs it, in either order.
A failure means that one is deleted too early, or never (I11, I12).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dstl_service.collection.garbage_collector import ORPHAN_AGE_MIN_MS, GarbageReport, collect_garbage
from dstl_service.collection.retention import RetentionSettings
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.uploads.settings import UploadSettings
from dstl_service.wire import decode_frames
from storage.clock import SystemClock
from storage.memory_store import MemoryStore
from storage.testing import FakeClock, Fault, FaultKind, FaultyStore
from tests.rocksdb_files import sst_file
from tests.unit.dstl_service.http_life import Life, service, text
from tests.unit.dstl_service.samples import opened
from tests.unit.dstl_service.snapshots import FILES, snapshot_folder
from tests.waiting import wait_until

HALVES = ({"first_key_group": 0, "last_key_group": 63}, {"first_key_group": 64, "last_key_group": 127})
SEGMENTS = "job/segments/*"


class CollectedJob:
    """A job with two partitions; the sets of a checkpoint share an object."""

    def __init__(self, life: Life, store: FaultyStore, folder: Path) -> None:
        self.life = life
        self.store = store
        self._folder = folder
        self.base: Any = None
        self.payloads: list[tuple[bytes, bytes]] = []
        life.open()

    def sets(self, attempt: int = 1) -> list[dict[str, Any]]:
        """Send the changes of the next batch's tasks."""
        number = len(self.payloads)
        self.payloads.append((b"first %d" % number, b"second %d" % number))
        return [
            self.life.append(payload, checkpoint_id=number, partition=partition, attempt=attempt, **HALVES[partition])
            for partition, payload in enumerate(self.payloads[-1])
        ]

    def checkpoint(self, *reported: dict[str, Any], count: int = 1) -> Any:
        """Complete the next checkpoints, the first of which reports stored snapshots; return the last reference."""
        for number in range(count):
            refs = self.sets()
            named = list(reported) if number == 0 else []
            self.base = self.life.complete(len(self.payloads) - 1, self.base, *refs, **self.plan(named))
        return self.base

    def plan(self, reported: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the parameters of a checkpoint except its sets."""
        operator = {"name": "op", "parallelism": 2, "key_schema": "{}", "states": {}}
        return {"materializations": reported, "operators": [operator]}

    def materialized(self, *halves: int, **changed: bytes) -> list[dict[str, Any]]:
        """Store these partitions' tables as they are now, one checkpoint later; return the handles."""
        announced = []
        for half in halves:
            self.restored(self.base, half)  # tells the sidecar what became of the last one
            path = snapshot_folder(self._folder / f"{len(self.payloads)}-{half}", **changed)
            body = {"operator": "op", "version": text(self.base), "path": str(path), **HALVES[half]}
            answer = self.life.client.post(f"{self.life.path}/materializations", json=body)
            assert answer.status_code == 202, answer.text
            announced.append(self.restored(self.base, half)[0]["materialized"])
        self.checkpoint(*announced)
        return [wait_until(partial(self._offered, half)) for half in halves]

    def _offered(self, half: int) -> dict[str, Any] | None:
        offered: dict[str, Any] | None = self.restored(self.base, half)[0]["materialized"]
        return offered if offered and "index" in offered else None

    def restored(self, ref: Any, half: int) -> tuple[dict[str, Any], dict[str, bytes], list[bytes]]:
        """Restore an empty table of one partition; return the plan, the files of its snapshot, and the log."""
        answer = self.life.restore_raw(ref, None, **HALVES[half])
        assert answer.status_code == 200, answer.text
        (plan, _), *frames, (end, _) = decode_frames(io.BytesIO(answer.content))
        assert end["kind"] == "end"
        assert [header for header, _ in frames if header["kind"] == "error"] == []
        files = {header["name"]: payload for header, payload in frames if header["kind"] == "file"}
        return plan, files, [payload for header, payload in frames if header["kind"] == "segment"]

    def log(self, ref: Any, half: int) -> list[bytes]:
        """Return the log of one partition."""
        return self.restored(ref, half)[2]

    def objects(self, folder: str = "segments") -> set[str]:
        """Return the stored objects."""
        return {info.key for info in self.store.list(f"job/{folder}/")}

    def collect(self, after_ms: int = 10 * ORPHAN_AGE_MIN_MS) -> GarbageReport:
        """Collect garbage with the clock advanced by this time."""
        clock = FakeClock(SystemClock().now_ms() + after_ms)
        return collect_garbage(self.store, opened(self.store), "job", clock, checkpoints_max=1)


@contextmanager
def running(folder: Path, retained: int = 1, **settings: Any) -> Iterator[CollectedJob]:
    """Run a service that retains this number of checkpoints and deletes others at once, without compaction."""
    store = FaultyStore(MemoryStore())
    values = {
        "retention": RetentionSettings(checkpoints_max=retained, delay_s=0),
        "compaction": CompactionSettings(enabled=False),
        "materialization": MaterializationSettings(upload_attempts_max=1),
        **settings,
    }
    with service(store, **values) as life:
        yield CollectedJob(life, store, folder)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[CollectedJob]:
    """Return a job of which only the newest checkpoint is kept."""
    with running(tmp_path) as made:
        yield made


def test_materialized_log_goes_when_subsumed(tmp_path: Path) -> None:
    """I11: a materialized log stays while a checkpoint from before needs it, and is deleted with that checkpoint."""
    with running(tmp_path, retained=2) as job:
        before = job.checkpoint(count=3)
        old = job.objects()
        named = job.checkpoint(*job.materialized(0, 1))

        assert job.log(named, 0) == [b"first 3", b"first 4"]
        assert job.log(before, 0) == [b"first 0", b"first 1", b"first 2"]
        assert old < job.objects()

        newest = job.checkpoint()
        wait_until(lambda: not old & job.objects())
        assert len(job.objects()) == 3
        assert [job.log(newest, half) for half in (0, 1)] == [
            [b"first 3", b"first 4", b"first 5"],
            [b"second 3", b"second 4", b"second 5"],
        ]


def test_subsumed_log_goes_when_materialized(job: CollectedJob) -> None:
    """I11: additions of subsumed checkpoints stay until they are materialized, and are deleted then."""
    job.checkpoint(count=25)
    wait_until(lambda: len(job.objects("checkpoints")) <= 6)
    assert len(job.objects()) == 25
    assert job.log(job.base, 1) == [second for _, second in job.payloads]

    job.checkpoint(*job.materialized(0, 1))
    wait_until(lambda: len(job.objects()) == 2)
    assert job.log(job.base, 1) == [b"second 25", b"second 26"]


def test_object_of_two_tables_goes_with_the_last(job: CollectedJob) -> None:
    """I11: an object that holds sets of two tables stays until both are materialized, in either order."""
    job.checkpoint(count=3)
    shared = job.objects()
    job.checkpoint(*job.materialized(1))
    job.checkpoint()
    wait_until(lambda: len(job.objects("checkpoints")) == 3)  # a fence, the complete manifest, and the newest
    assert shared <= job.objects()
    assert job.log(job.base, 0) == [first for first, _ in job.payloads]
    assert job.log(job.base, 1) == [b"second 3", b"second 4", b"second 5"]

    job.checkpoint(*job.materialized(0))
    wait_until(lambda: not shared & job.objects())
    assert job.log(job.base, 0) == [b"first 6", b"first 7"]


def test_upload_that_ends_after_abort_is_collected(tmp_path: Path) -> None:
    """I12: an upload that ends after its checkpoint was given up leaves an orphan; only that is deleted."""
    with running(tmp_path, upload=UploadSettings(timeout_ms=10_000)) as job:
        job.checkpoint()
        kept = job.objects()
        job.store.inject(Fault("put", FaultKind.DELAY, SEGMENTS))
        refs = job.sets()
        job.life.persist(*refs, wait=False)
        wait_until(lambda: "dstl_upload_attempts_running 1.0" in job.life.client.get("/metrics").text)
        assert job.life.abort(1).status_code == 204
        job.store.release()
        wait_until(lambda: len(job.objects()) == 2)
        orphan = job.objects() - kept
        job.payloads.pop()
        refs = job.sets(attempt=2)
        job.base = job.life.complete(1, job.base, *refs)

        assert set(job.collect().orphans) == orphan
        assert job.log(job.base, 0) == [b"first 0", b"first 1"]


def test_files_of_two_snapshots_go_with_the_last(job: CollectedJob) -> None:
    """I11: only those files of a replaced snapshot are deleted that the next one does not share (I12)."""
    job.checkpoint()
    job.checkpoint(*job.materialized(0, _000011=b"of the first"))
    before = job.objects("materialized")
    job.checkpoint(*job.materialized(0, _000012=b"of the second"))
    job.checkpoint()
    job.collect()

    left = job.objects("materialized")
    assert len(before & left) == len(FILES)
    assert len(before - left) == 2  # the index, and the file that only it named
    _, files, log = job.restored(job.base, 0)
    assert files == {**FILES, "000012.sst": sst_file(b"of the second")}
    assert log == [b"first 3", b"first 4", b"first 5"]


def test_snapshot_of_failed_checkpoint_is_used_again(job: CollectedJob) -> None:
    """I11: files reported with a failed checkpoint are still there for the next one that names them."""
    job.checkpoint()
    job.checkpoint(*job.materialized(0))
    reported = job.materialized(0, _000011=b"new")
    refs = job.sets()
    job.store.inject(Fault("put", FaultKind.FAIL_BEFORE, "job/checkpoints/*"))
    failed = job.life.complete_raw(4, job.base, *refs, **job.plan(reported))
    assert failed.status_code == 503
    assert job.life.abort(4).status_code == 204
    assert not any("materialized" in key for key in job.collect().orphans)
    job.payloads.pop()

    job.checkpoint(*reported)
    job.collect()
    assert job.restored(job.base, 0)[1] == {**FILES, "000011.sst": sst_file(b"new")}


def test_savepoint_keeps_its_snapshots_and_stops_none(job: CollectedJob) -> None:
    """I11, I13: a savepoint keeps snapshots and log that are replaced later; materialization continues."""
    job.checkpoint()
    saved = job.checkpoint(*job.materialized(0, 1, _000011=b"of the savepoint"))
    assert job.life.client.put(f"{job.life.path}/savepoints/kept", json={}).status_code == 200
    for number in (b"1", b"2"):
        newest = job.checkpoint(*job.materialized(0, 1, _000012=number))
        job.collect()

        assert job.log(newest, 0) == [first for first, _ in job.payloads[-2:]]
        assert job.restored(newest, 0)[1] == {**FILES, "000012.sst": sst_file(number)}
        assert job.restored(saved, 1)[1:] == (
            {**FILES, "000011.sst": sst_file(b"of the savepoint")},
            [b"second 1", b"second 2"],
        )

    assert job.life.client.delete(f"{job.life.path}/savepoints/kept").status_code == 204
    job.checkpoint()
    job.collect()
    assert not any(key.endswith(f"-{len(sst_file(bytes(16)))}.sst") for key in job.objects("materialized"))
    assert job.life.restore_raw(saved).status_code == 404
