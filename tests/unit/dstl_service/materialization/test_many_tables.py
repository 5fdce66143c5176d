"""A job with many tables on one host: each gets its snapshot, however slow the store is."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from dstl_service.formats.manifest import Manifest, ManifestKind, StateView
from dstl_service.formats.under_way import UnderWay, followed
from dstl_service.materialization.admission import choose_materializations
from dstl_service.materialization.materializer import Materializer
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import RestorePlan
from dstl_service.restore.table_id import TableId
from dstl_service.restore.truncation import truncate
from dstl_service.wire import OperatorInfo
from storage.key_groups import key_group_range
from storage.memory_store import MemoryStore
from storage.model import SegmentHandle
from storage.testing import FakeClock, FakeIds, RecordingStore
from tests.unit.dstl_service.samples import handles_of, manifest, segment
from tests.unit.dstl_service.snapshots import snapshot_folder

TABLES = 1000
BATCH_S = 60
INTERVAL_S = 600
REQUEST_MS = 1  # 15 ms each, 16 at a time
LOG: list[SegmentHandle] = handles_of([segment()])


class SlowStore(MemoryStore):
    """Takes time for every index."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self._slow = clock

    def get(self, key: str) -> bytes:
        """Get; time passes."""
        if key.endswith(".json") and "/materialized/" in key:
            self._slow.advance(REQUEST_MS)
        return super().get(key)


class ManyTablesJob:
    """A driver, its tasks, and their only sidecar."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor) -> None:
        self.clock = FakeClock()
        self.store = RecordingStore(SlowStore(self.clock))
        self.jobs = JobStore(self.store, "job", self.clock, FakeIds())
        self.jobs.open(4096)
        settings = MaterializationSettings(interval_s=INTERVAL_S, threads=16)
        ids = FakeIds(3)
        self.sidecar = Materializer(settings, self.store, self.clock, ids, executor, CollectorRegistry())
        self.folder = folder
        self.operator = OperatorInfo("op", TABLES, "{}", {})
        self.tables = [
            TableId("job", "op", key_group_range(n, TABLES, self.jobs.max_parallelism)) for n in range(TABLES)
        ]
        self.newest: Manifest = self.complete(None, StateView((), []), UnderWay())

    def complete(self, base: Manifest | None, view: StateView, under_way: UnderWay) -> Manifest:
        """Complete the next checkpoint."""
        made = manifest(
            base.id + 1 if base else 0,
            1,
            base.ref if base else None,
            job_uid=self.jobs.job_uid,
            kind=ManifestKind.COMPLETE,
        )
        created, _size = self.jobs.create_manifest(
            replace(made, operators=(self.operator,), materializations=view.materializations, under_way=under_way)
        )
        return created

    async def batch(self) -> None:
        """Let all tables advance, hand over the requested snapshots, and complete the checkpoint with the reports."""
        self.clock.advance(BATCH_S * 1000)
        base, reported = self.newest.ref, []
        for table in self.tables:
            changed = replace(LOG[0], entry=replace(LOG[0].entry, id=replace(LOG[0].entry.id, checkpoint_id=base.id)))
            offer = await self.sidecar.offer(table, self.jobs, RestorePlan(True, table.key_groups, [changed]), base)
            if offer.materialize:
                path = snapshot_folder(self.folder / f"{base.id}-{table.key_groups.first}")
                await self.sidecar.take(table, self.jobs, base, str(path))
            if offer.report is not None:
                reported.append(offer.report)
        chosen = choose_materializations(self.jobs, "job", base, reported, self.clock, 500, at_once=1)
        view = truncate(self.jobs.state(base), chosen.taken)
        listed = followed(
            self.newest.under_way,
            base,
            chosen.announced,
            {*chosen.refused, *(handle.uid for handle in chosen.taken)},
            [self.operator],
            view.materializations,
            self.jobs.max_parallelism,
        )
        self.newest = self.complete(self.newest, view, UnderWay(listed))
        while self.sidecar.is_busy:  # noqa: ASYNC110 - threads bring it about
            await asyncio.sleep(0.001)


def test_every_table_has_a_snapshot_within_three_intervals(tmp_path: Path) -> None:
    """I13: of 1,000 tables with batches of 60 s, each is materialized in three intervals, and no upload is wasted."""

    async def run(executor: ThreadPoolExecutor) -> ManyTablesJob:
        job, batches = ManyTablesJob(tmp_path, executor), 0
        while len(job.newest.materializations) < TABLES:
            await job.batch()
            batches += 1
            assert batches * BATCH_S <= 3 * INTERVAL_S
        await job.sidecar.close()
        return job

    with ThreadPoolExecutor(16) as executor:
        job = asyncio.run(run(executor))
    stored = len(job.store.keys("put", "job/materialized/*.json"))
    assert job.store.count("get", "job/materialized/*.json") <= 2 * stored  # once for the check, once as a parent
