"""Output of a sink in a real service: kept until it is published, whatever else is compacted, retained or rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.job_session import JobSession
from backend_client.service.output_log import read_output
from backend_client.settings import BackendSettings
from backend_client.sinks.records import change_sets, record_batches
from dstl_service.formats.manifest import object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import SINK, ChangeSetRef, CheckpointRef, FormerSlots, OperatorInfo
from storage.clock import SystemClock, SystemIds
from storage.errors import ConflictError, NotFoundError
from storage.key_groups import KeyGroupRange
from storage.open import open_store
from tests.support.lost_registry import newest_after_a_rebuild
from tests.waiting import wait_until
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

CHECKPOINTS = 60
SETTINGS = {
    "DSTL_RETENTION_CHECKPOINTS_MAX": "3",
    "DSTL_RETENTION_DELAY_S": "0",
    "DSTL_COMPACTION_FLOOR_BYTES": "1",
    "DSTL_COMPACTION_LOG_RATIO_MAX": "0.01",
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(f"file://{tmp_path / 'store'}", SETTINGS) as running:
        yield running


class SinkJob(JobDriver):
    """A job with one sink of two slots, which writes one row per slot and checkpoint."""

    def __init__(self, client: ServiceClient) -> None:
        super().__init__(client, "job", operator="output")
        self.refs: list[CheckpointRef] = []

    def batch(self, published: int | None) -> None:
        """Complete the next checkpoint; it tells what is published."""
        refs: list[ChangeSetRef] = []
        for slot in (0, 1):
            rows = pa.record_batch({"v": [f"{slot}-{self.next_id}" + "x" * 500]})
            ((changes, _),) = change_sets([rows], slot, self.epoch, 1 << 20)
            refs += self.write(changes, partition=slot, key_groups=KeyGroupRange(slot, slot))
        sink: dict[str, Any] = {"operators": [OperatorInfo("output", 2, "S", {}, kind=SINK, published=published)]}
        self.refs.append(self.complete(refs, **sink).ref)

    def logged(self, slot: int, after: CheckpointRef | None = None, to: CheckpointRef | None = None) -> list[int]:
        """Return the ids of the checkpoints whose output the log of a checkpoint has, by default of the newest one."""
        assert self.base is not None
        found = []
        for item in read_output(self.client, self.name, "output", slot, after, to or self.base, self.base):
            (row,) = [row for batch in record_batches(item.changes, item.source) for row in batch.to_pylist()]
            assert row["v"].startswith(f"{slot}-{item.checkpoint_id}x")
            found.append(item.checkpoint_id)
        return found


def test_unpublished_output_stays_and_published_goes(service: ServiceProcess, tmp_path: Path) -> None:
    """I11: output far older than all retained checkpoints can be read until it is published; then it is deleted."""
    client = ServiceClient(service.address, patience_s=30)
    job = SinkJob(client)
    for _ in range(CHECKPOINTS):
        job.batch(published=4)
    assert job.logged(0) == list(range(5, CHECKPOINTS)), "from the complete checkpoint 40 on, 0 to 4 are left out"
    assert job.logged(1, job.refs[-2]) == [CHECKPOINTS - 1]
    assert job.logged(1, job.refs[10]) == list(range(11, CHECKPOINTS)), "its manifest is deleted, its output is not"

    store = open_store(f"file://{tmp_path / 'store'}")
    jobs = JobStore(store, "job", SystemClock(), SystemIds())
    jobs.open(None)

    def is_deleted() -> bool:
        with suppress(NotFoundError):
            return not list(jobs.chain(job.refs[10]))
        return True

    wait_until(is_deleted)
    assert job.logged(0, job.refs[7], job.refs[10]) == [8, 9, 10], "the newest checkpoint's log has it, too"
    assert job.logged(1, None, job.refs[10]) == [5, 6, 7, 8, 9, 10]
    with pytest.raises(NotFoundError):
        list(read_output(client, job.name, "output", 0, None, job.refs[10]))
    assert job.base is not None
    assert list(read_output(client, job.name, "output", 0, job.refs[-2], job.base, is_set_back=True))
    with pytest.raises(ConflictError, match="had published more than checkpoint 2, where it stands: its system was"):
        list(read_output(client, job.name, "output", 0, job.refs[2], job.base, is_set_back=True))
    for _ in range(21):
        job.batch(published=CHECKPOINTS - 1)
    assert job.logged(0)[0] >= CHECKPOINTS
    newest = jobs.newest()
    assert newest is not None
    assert len(object_keys(newest)) <= 21
    client.close()


def test_a_start_knows_the_slots_that_went_out_of_use(service: ServiceProcess, tmp_path: Path) -> None:
    """They come with the newest checkpoint, through the service."""
    client = ServiceClient(service.address, patience_s=30)
    job = SinkJob(client)
    job.batch(published=None)
    former = FormerSlots(3, job.refs[0])
    sink: dict[str, Any] = {"operators": [OperatorInfo("output", 2, "S", {}, kind=SINK, former_slots=former)]}
    job.complete([], **sink)
    known = JobSession.find(client, BackendSettings(f"file://{tmp_path / 'store'}", "job"))
    assert known is not None
    assert known.latest is not None
    assert known.latest.operators[0].former_slots == former
    client.close()


def test_a_sink_has_no_table(service: ServiceProcess) -> None:
    """No task of a sink is asked for a snapshot, and its output is not compacted by key."""
    client = ServiceClient(service.address, patience_s=30)
    job = SinkJob(client)
    for _ in range(25):
        job.batch(published=None)
    assert job.logged(0) == list(range(25))
    metrics = service.metrics()
    assert metrics["dstl_materializations_triggered_total"] == 0
    assert metrics["dstl_compactions_total"] == 0
    assert metrics["dstl_restore_planned_bytes_total"] == 0
    client.close()


def test_a_rebuilt_registry_has_the_output(service: ServiceProcess, tmp_path: Path) -> None:
    """I10: notes name a sink's change sets as they name all others."""
    client = ServiceClient(service.address, patience_s=30)
    job = SinkJob(client)
    for _ in range(3):
        job.batch(published=0)
    newest = newest_after_a_rebuild(service, tmp_path / "store")
    assert newest.operators[0].kind == SINK
    job.base = newest.ref
    assert job.logged(0) == [0, 1, 2]
    client.close()
