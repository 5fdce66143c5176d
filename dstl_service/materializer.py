"""
Materialization on a sidecar: asks tasks for snapshots when they are due, and has them stored in the background (I13).

A restore tells which table stands where and what was logged, so each is a chance to ask its task for a snapshot. The
task hands a folder of hard links over and goes on. When the snapshot is stored, its handle is kept until a checkpoint
names it: it travels with the next restore to a task, with that task's receipt to the driver, and from there to the
coordinator. If this process ends before, the next one finds it (`awaited_snapshots`). Whatever goes wrong ends one
materialization, and nothing else.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from dstl_service.awaited_snapshots import find_awaited
from dstl_service.job_store import JobStore
from dstl_service.materialization_check import choose_materializations
from dstl_service.materialization_index import handover_ms_max, may_enter
from dstl_service.materialization_metrics import GaugeValues, MaterializationMetrics
from dstl_service.materialization_policy import MaterializationSettings, Schedule
from dstl_service.restore import RestorePlan, plan_restore
from dstl_service.snapshot_folder import SnapshotFolder
from dstl_service.snapshot_uploader import KnownFiles, SnapshotUploader, TableId
from dstl_service.truncation import would_count
from dstl_service.wire import CheckpointRef
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, DstlError
from storage.model import MaterializationHandle
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")
_MEASURED_BYTES_MIN = 1 << 20
_CHANCE_BITS = 32
_CHOICE_MS = 500
"""How long the coordinator looks at reported handles while the checkpoint's sets become durable."""
_CHOICE_HUNG_S = 2.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a restore tells its task: whether to make a snapshot, and which stored one to report to the driver."""

    materialize: bool = False
    materialized: MaterializationHandle | None = None


@dataclass(slots=True)
class _Table:
    """What is known of one table of this host."""

    schedule: Schedule
    known: KnownFiles = field(default_factory=KnownFiles)
    path: str | None = None
    stored: MaterializationHandle | None = None
    stored_ms: int = 0


class Materializer:
    """
    Keeps the schedules of a host's tables, and their snapshots until a checkpoint names them.

    Args:
        settings: When, and how fast.
        store: Where snapshots go.
        clock: For times and delays.
        ids: Names materializations, and gives chance.
        executor: Runs blocking calls; one that hangs must not take a thread from others.
        orphan_age_min_ms: After which time the garbage collector takes what nobody names.
        registry: Where the metrics are.
    """

    def __init__(
        self,
        settings: MaterializationSettings,
        store: ObjectStore,
        clock: Clock,
        ids: IdSource,
        executor: Executor,
        orphan_age_min_ms: int,
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._ids = ids
        self._executor = executor
        self._handover_ms = handover_ms_max(orphan_age_min_ms)
        self._uploader = SnapshotUploader(settings, store, clock, ids, executor, self._handover_ms // 2)
        self._tables: dict[TableId, _Table] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_bytes_per_s = float(settings.replay_bytes_per_s)
        self.metrics = MaterializationMetrics(registry, self._gauges)

    @property
    def is_busy(self) -> bool:
        """Say whether a snapshot is being stored."""
        return bool(self._tasks)

    async def offer(self, table_id: TableId, jobs: JobStore, plan: RestorePlan, want: CheckpointRef) -> Offer:
        """
        Take note of a restore, and decide what its task is told. Never raises: a restore must not fail for this.

        Args:
            table_id: The table that is restored.
            jobs: Its job.
            plan: What it gets.
            want: The checkpoint at which it will stand.
        """
        try:
            table = self._tables.get(table_id)
            is_new = table is None
            if table is None:
                table = self._add(table_id)
                if not plan.is_full:
                    # Another process counted the log before; from here on it is counted as it comes.
                    key = (table_id.operator, table_id.key_groups)
                    plan = await self._in_thread(plan_restore, jobs, *key, None, want)
            self._count_log(table.schedule, plan)
            if is_new and self._settings.enabled:
                await self._find_awaited(table_id, table, jobs, want)
            await self._drop_named(table_id, table, jobs, want)
            return Offer(self._ask(table_id, table), table.stored)
        except DstlError as error:
            logger.warning("materialization not considered", extra={**_names(table_id), "error": str(error)})
            return Offer()

    async def take(self, table_id: TableId, jobs: JobStore, version: CheckpointRef, path: str) -> None:
        """
        Take a snapshot over: store it in the background, and remove its folder.

        Args:
            table_id: The table of which it is.
            jobs: Its job.
            version: The checkpoint at which the table stood.
            path: The folder. Taking the same one again changes nothing.

        Raises:
            ConflictError: Another snapshot of this table is being stored; count this one as skipped.
            InvalidInputError: The folder cannot be taken.
            NotFoundError: The checkpoint does not exist.
        """
        table = self._tables.get(table_id) or self._add(table_id)
        if table.path == path:
            return
        if table.path is not None:
            self.metrics.skipped.labels(table_id.job, table_id.operator).inc()
            raise ConflictError("another snapshot of this table is being stored", **_names(table_id))
        table.path = path
        try:
            await self._in_thread(jobs.resolve, version)
            folder = await self._in_thread(SnapshotFolder.open, path, self._settings.root)
        except BaseException:
            table.path = None
            self._failed(table_id, table)
            raise
        table.schedule.begin(self._clock.monotonic_ms(), version.id)
        self.metrics.started.labels(table_id.job, table_id.operator).inc()
        task = asyncio.get_running_loop().create_task(self._store_snapshot(table_id, table, jobs, version, folder))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def choose(
        self, job: str, jobs: JobStore, base: CheckpointRef | None, reported: Sequence[dict[str, Any]]
    ) -> list[MaterializationHandle]:
        """
        Return what of the reported handles the checkpoint after `base` takes into its state.

        Never raises, and does not keep the checkpoint waiting for long: what is left out is reported again.
        """
        if not reported or base is None:
            return []
        choose = partial(
            choose_materializations, self._store, jobs, job, base, reported, self._clock, self._handover_ms, _CHOICE_MS
        )
        try:
            chosen, refused = await asyncio.wait_for(self._in_thread(choose), _CHOICE_HUNG_S)
        except (DstlError, TimeoutError) as error:
            logger.warning("materializations left to a later checkpoint", extra={"job": job, "error": repr(error)})
            return []
        for handle in chosen:
            self.metrics.named.labels(job, handle.operator).inc()
        self.metrics.refused.labels(job).inc(refused)
        return chosen

    def replayed(self, size_bytes: int, duration_ms: int) -> None:
        """Learn how fast a log is applied; what is too small to tell is left out."""
        if size_bytes >= _MEASURED_BYTES_MIN and duration_ms > 0:
            measured = size_bytes * 1000 / duration_ms
            self._replay_bytes_per_s += (measured - self._replay_bytes_per_s) / 2

    async def close(self) -> None:
        """Stop; what is not stored by now is stored by a later materialization."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _add(self, table_id: TableId) -> _Table:
        now_ms = self._clock.monotonic_ms()
        for other_id in [other for other, table in self._tables.items() if table.schedule.is_stale(now_ms)]:
            del self._tables[other_id]
        chance = int(self._ids.unique_id()[-_CHANCE_BITS // 4 :], 16) / 2**_CHANCE_BITS
        table = self._tables[table_id] = _Table(Schedule(self._settings, now_ms, chance))
        return table

    def _count_log(self, schedule: Schedule, plan: RestorePlan) -> None:
        sizes: defaultdict[int, int] = defaultdict(int)
        for handle in plan.handles:
            sizes[handle.entry.id.checkpoint_id] += handle.entry.size_bytes
        for checkpoint_id, size_bytes in sorted(sizes.items()):
            schedule.logged(checkpoint_id, size_bytes)
        if plan.materializations:
            schedule.table_bytes = max(
                schedule.table_bytes, *(item.handle.size_bytes for item in plan.materializations)
            )

    async def _find_awaited(self, table_id: TableId, table: _Table, jobs: JobStore, want: CheckpointRef) -> None:
        """Take up what an earlier process stored and no checkpoint has taken in."""
        found = await self._in_thread(find_awaited, self._store, jobs, table_id, want, self._clock, self._handover_ms)
        if found is None or table.stored is not None or table.path is not None:
            return
        table.stored, age_ms = found
        now_ms = self._clock.monotonic_ms()
        table.stored_ms = now_ms - age_ms
        table.schedule.completed(now_ms, table.stored.size_bytes)
        logger.info("stored materialization found", extra={**_names(table_id), "uid": table.stored.uid})

    def _may_enter(self, table: _Table, want: CheckpointRef) -> bool:
        """Say whether the checkpoint after `want` may take in what is stored."""
        age_ms = self._clock.monotonic_ms() - table.stored_ms
        return table.stored is not None and may_enter(table.stored.checkpoint_id, want.id, age_ms, self._handover_ms)

    async def _drop_named(self, table_id: TableId, table: _Table, jobs: JobStore, want: CheckpointRef) -> None:
        """Forget a handle that a checkpoint names, that none needs any more, or that is too old for one to take it."""
        stored = table.stored
        if stored is None:
            return
        state = await self._in_thread(jobs.state, want)
        if any(handle.uid == stored.uid for handle in state.materializations) or not would_count(state, stored):
            table.stored = None
            table.schedule.named()
        elif not self._may_enter(table, want):
            table.stored = None
            logger.warning("materialization was taken by no checkpoint", extra={**_names(table_id), "uid": stored.uid})
            self._count_failure(table_id, table, must_report=table.schedule.untaken(self._clock.monotonic_ms()))

    def _ask(self, table_id: TableId, table: _Table) -> bool:
        schedule, now_ms = table.schedule, self._clock.monotonic_ms()
        if schedule.is_unanswered(now_ms):
            logger.warning("a task was asked for a snapshot and handed none over", extra=_names(table_id))
            self._failed(table_id, table)
        skipped = schedule.skipped
        trigger = schedule.ask(now_ms, self._replay_bytes_per_s)
        labels = (table_id.job, table_id.operator)
        self.metrics.skipped.labels(*labels).inc(schedule.skipped - skipped)
        if trigger is None:
            return False
        self.metrics.triggered.labels(*labels, trigger.value).inc()
        logger.info("materialization due", extra={**_names(table_id), "trigger": trigger.value})
        return True

    async def _store_snapshot(
        self, table_id: TableId, table: _Table, jobs: JobStore, version: CheckpointRef, folder: SnapshotFolder
    ) -> None:
        started_ms = self._clock.monotonic_ms()
        labels = (table_id.job, table_id.operator)
        try:
            stored = await self._uploader.store(table_id, jobs, version, folder, table.known)
        except DstlError as error:
            logger.warning("materialization failed", extra={**_names(table_id), "error": str(error)})
            self._failed(table_id, table)
        except Exception:  # a programming error must not leave the table without materialization for ever
            logger.exception("materialization failed", extra=_names(table_id))
            self._failed(table_id, table)
        else:
            now_ms = self._clock.monotonic_ms()
            table.stored, table.stored_ms = stored.handle, now_ms
            table.schedule.completed(now_ms, stored.handle.size_bytes)
            self.metrics.completed.labels(*labels).inc()
            self.metrics.uploaded_bytes.labels(*labels).inc(stored.uploaded_bytes)
            self.metrics.reused_bytes.labels(*labels).inc(stored.reused_bytes)
            self.metrics.seconds.observe((now_ms - started_ms) / 1000)
            logger.info(
                "materialization stored",
                extra={
                    **_names(table_id),
                    "checkpoint_id": version.id,
                    "uid": stored.handle.uid,
                    "uploaded_bytes": stored.uploaded_bytes,
                    "reused_bytes": stored.reused_bytes,
                    "duration_ms": now_ms - started_ms,
                },
            )
        finally:
            table.path = None
            # Not waited for: this may run while the service stops.
            self._executor.submit(folder.remove)

    def _failed(self, table_id: TableId, table: _Table) -> None:
        self._count_failure(table_id, table, must_report=table.schedule.failed(self._clock.monotonic_ms()))

    def _count_failure(self, table_id: TableId, table: _Table, *, must_report: bool) -> None:
        labels = (table_id.job, table_id.operator)
        self.metrics.failed.labels(*labels).inc()
        if must_report:
            self.metrics.failures_reported.labels(*labels).inc()
            logger.error(
                "materialization keeps failing; checkpoints go on, the log grows",
                extra={**_names(table_id), "failures": table.schedule.failures},
            )

    def _gauges(self) -> GaugeValues:
        now_ms = self._clock.monotonic_ms()
        values: GaugeValues = {}
        for table_id, table in list(self._tables.items()):
            schedule = table.schedule
            if schedule.is_stale(now_ms):
                continue
            found = values.setdefault((table_id.job, table_id.operator), defaultdict(float))
            found["materialization_log_bytes"] += schedule.log_bytes
            found["materialization_table_bytes"] += schedule.table_bytes
            found["materializations_running"] += schedule.is_running
            for name, value in (
                ("materialization_running_seconds", schedule.running_s(now_ms)),
                ("materialization_success_age_seconds", schedule.since_success_s(now_ms)),
                ("materialization_consecutive_failures", schedule.failures),
            ):
                found[name] = max(found[name], value)
        return values

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))


def _names(table_id: TableId) -> dict[str, str]:
    return {"job": table_id.job, "operator": table_id.operator, "key_groups": table_id.key_groups.to_text()}
