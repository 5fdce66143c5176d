"""Rows set aside, in a real service: kept until they have run, whatever else is compacted, retained or rebuilt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from backend_client.failover.set_aside_entries import by_partition, companion_info, companion_of, to_run
from backend_client.failover.set_aside_log import log_rows, read_logged
from backend_client.key_group_sql import HASH_BITS
from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from dstl_service.formats.manifest import object_keys
from dstl_service.registry.job_store import JobStore
from dstl_service.repair.fsck import check_job
from dstl_service.wire import ChangeSetRef, LogTarget, OperatorInfo, RowsSetAside
from storage.clock import SystemClock, SystemIds
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange
from storage.open import open_store
from tests.support.lost_registry import newest_after_a_rebuild
from tools.servers.service.job_driver import ALL_KEY_GROUPS, JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SETTINGS = {
    "DSTL_RETENTION_CHECKPOINTS_MAX": "3",
    "DSTL_RETENTION_DELAY_S": "0",
    "DSTL_COMPACTION_FLOOR_BYTES": "1",
    "DSTL_COMPACTION_LOG_RATIO_MAX": "0.01",
}
INFO = OperatorInfo("op", 2, "{}", {}, kind="rows")
LEFT, RIGHT = KeyGroupRange(0, 63), KeyGroupRange(64, 127)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with ServiceProcess(f"file://{tmp_path / 'store'}", SETTINGS) as running:
        yield running


class StallingJob(JobDriver):
    """A job of one operator with two partitions, which set rows aside on demand: one row per key group."""

    waiting: tuple[RowsSetAside, ...] = ()

    def batch(self, stalled: Sequence[KeyGroupRange] = (), *, runs: Sequence[KeyGroupRange] = ()) -> None:
        """Complete the next checkpoint; what waits of the key groups `runs` has run in it."""
        number, refs = self.next_id, list[ChangeSetRef]()
        left = tuple(entry for entry in self.waiting if entry.key_groups not in runs)
        for partition, key_groups in enumerate(stalled):
            target = LogTarget("job", companion_of("op"), number, self.epoch, 1, partition, key_groups)
            writer = LogWriter(self.client, target)
            rows = [rows_of(key_groups, number)]
            count = log_rows(rows, key_groups, self.epoch, writer, 200)
            size = sum(ref.size_bytes for ref in writer.refs)
            left = (*left, RowsSetAside(number, key_groups.first, key_groups.last, count, size))
            refs += writer.refs
        refs += self.write({bytes([0, 1, number % 7]): b"x" * 500}, partition=0, key_groups=LEFT)
        self.complete(refs, operators=[INFO, companion_info(INFO, "columns", left)])
        self.waiting = left

    def found(self, key_groups: KeyGroupRange) -> list[tuple[int, list[int]]]:
        """Return batch and key groups of the rows that a partition would run, in their order."""
        base = self.base
        assert base is not None
        return [
            (entries[0].checkpoint_id, [order >> HASH_BITS for rows in batches for order in rows.column(0).to_pylist()])
            for entries in by_partition(to_run(self.waiting, key_groups))
            for batches in [read_logged(self.client, "job", companion_of("op"), key_groups, entries, base)]
        ]


def rows_of(key_groups: KeyGroupRange, number: int) -> pa.RecordBatch:
    """Return one row for each key group, in order."""
    orders = [(group << HASH_BITS) + 5 for group in range(key_groups.first, key_groups.last + 1)]
    return pa.record_batch({"order": pa.array(orders, pa.int64()), "v": [f"{number}-{order}" for order in orders]})


def test_waiting_rows_outlive_retention_and_compaction(service: ServiceProcess, tmp_path: Path) -> None:
    """I11: rows far older than all retained checkpoints can be read by any partitions; when they have run they go."""
    client = ServiceClient(service.address, patience_s=30)
    job = StallingJob(client)
    job.batch()
    job.batch([LEFT, RIGHT])
    job.batch([RIGHT])
    for _ in range(60):
        job.batch()

    assert job.found(LEFT) == [(1, [*range(64)])]
    assert job.found(RIGHT) == [(1, [*range(64, 128)]), (2, [*range(64, 128)])]
    parts = [(1, [*range(40, 64)]), (1, [*range(64, 80)]), (2, [*range(64, 80)])]
    assert job.found(KeyGroupRange(40, 79)) == parts
    store = open_store(f"file://{tmp_path / 'store'}")
    assert check_job(store, "job").problems == []
    jobs = JobStore(store, "job", SystemClock(), SystemIds())
    jobs.open(None)
    job.batch(runs=[LEFT, RIGHT])
    for _ in range(21):
        job.batch()
    newest = jobs.newest()
    assert newest is not None
    of_rows = [h for h in jobs.state(newest.ref).log if h.entry.id.operator == companion_of("op")]
    assert of_rows == []
    assert object_keys(newest)
    client.close()


def test_rows_that_have_run_are_not_read_again(service: ServiceProcess) -> None:
    """With another parallelism, a partition runs what waits of its key groups, beside rows of theirs that have run."""
    client = ServiceClient(service.address, patience_s=30)
    job = StallingJob(client)
    job.batch([LEFT, RIGHT])
    job.batch(runs=[LEFT])

    assert job.found(ALL_KEY_GROUPS) == [(0, [*range(64, 128)])]
    assert job.found(KeyGroupRange(40, 79)) == [(0, [*range(64, 80)])]
    client.close()


def test_missing_rows_are_an_error(service: ServiceProcess) -> None:
    """I10: rows that the log does not have are never taken for a batch without rows."""
    client = ServiceClient(service.address, patience_s=30)
    job = StallingJob(client)
    job.batch([RIGHT])
    job.waiting = (RowsSetAside(0, 64, 127, 65, 10),)

    with pytest.raises(CorruptDataError, match=r"set 65 rows aside .* the log has 64 of them"):
        job.found(RIGHT)
    client.close()


def test_a_rebuilt_registry_has_what_waits(service: ServiceProcess, tmp_path: Path) -> None:
    """I10: notes name rows set aside, and list them, as manifests do."""
    client = ServiceClient(service.address, patience_s=30)
    job = StallingJob(client)
    for _ in range(3):
        job.batch([LEFT, RIGHT])
    newest = newest_after_a_rebuild(service, tmp_path / "store")
    (companion,) = [info for info in newest.operators if not info.has_table]
    assert tuple(companion.set_aside) == job.waiting
    job.base = newest.ref
    assert job.found(LEFT) == [(number, [*range(64)]) for number in range(3)]
    client.close()
