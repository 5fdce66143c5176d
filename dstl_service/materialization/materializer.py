"""
Materialization on a sidecar: asks tasks for due snapshots, and stores them in the background (I13).

A restore tells a table's version and the size of its log, so each is a chance to ask its task for a snapshot. The task
hands over a folder of hard links and continues. Nothing is put before a checkpoint lists the snapshot as under way
(`dstl_service.formats.under_way`): its announcement, and once it is stored its handle, travels with a restore to a
task, with that task's receipt to the driver, and from there to the coordinator, until a checkpoint has it. A snapshot
dropped from the list is given up. If this process ends, the next one finds the snapshot in the list, and offers it if
its index exists.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from dstl_service.materialization.admission import Reported, choose_materializations
from dstl_service.materialization.pending import Offer, TableHistory
from dstl_service.materialization.policy import MaterializationSettings
from dstl_service.materialization.snapshot_uploader import SnapshotUploader
from dstl_service.materialization.tracked_table import Shared, TrackedTable
from dstl_service.metrics.materialization import GaugeValues, MaterializationMetrics
from dstl_service.process.shares import shares_of
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import RestorePlan, plan_restore
from dstl_service.restore.table_id import TableId
from dstl_service.wire import CheckpointRef, OperatorInfo
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_MEASURED_BYTES_MIN = 1 << 20
_CHOICE_MS = 500
"""How long the coordinator checks reported handles while the checkpoint's sets become durable."""
_CHOICE_HUNG_S = 2.0
_SWEEP_MS = 10_000
TABLES_MIN = 256
TABLES_PER_PARTITION = 4
"""
A job may have this many tables on a host for each of its partitions, and `TABLES_MIN` more: those of a parallelism
before, or of operators that the checkpoint does not have yet.
"""
TABLES_MAX = 100_000
"""Tables of all jobs on a host; the parallelism of which the number for one job follows is its writer's choice."""
_LOOK_S = 10.0
"""Interval of the check whether a checkpoint lists waiting snapshots; no restore tells it after a job's last batch."""


class Materializer:
    """
    Keeps the schedules of a host's tables, and their snapshots until a checkpoint names them.

    Args:
        settings: When to materialize, and how fast.
        store: Receives the snapshots.
        clock: For times and delays.
        ids: Names materializations; source of randomness.
        executor: Runs blocking calls; one that hangs must not take a thread from others.
        registry: Holds the metrics.
    """

    def __init__(
        self,
        settings: MaterializationSettings,
        store: ObjectStore,
        clock: Clock,
        ids: IdSource,
        executor: Executor,
        registry: CollectorRegistry,
    ) -> None:
        self.metrics = MaterializationMetrics(registry, self._gauges)
        uploader = SnapshotUploader(settings, store, clock, executor)
        self._shared = Shared(settings, store, clock, ids, executor, uploader, self.metrics)
        self._tables: dict[TableId, TrackedTable] = {}
        self._tables_of: Counter[str] = Counter()
        self._swept_ms = 0
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._replay_bytes_per_s = float(settings.replay_bytes_per_s)

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being stored."""
        return bool(self._shared.uploads)

    def trusted(self, table_id: TableId, from_checkpoint: CheckpointRef | None) -> CheckpointRef | None:
        """
        Return the version from which a table may advance; None if it must be restored, since its files are damaged.

        None is returned once, to the first task with a version. If that had another slot's table, or never got the
        answer, the table's next snapshot shows the damage again, and is not stored either.
        """
        table = self._tables.get(table_id)
        return from_checkpoint if table is None or from_checkpoint is None else table.trusted(from_checkpoint)

    async def offer(
        self, table_id: TableId, job_store: JobStore, plan: RestorePlan, to_checkpoint: CheckpointRef
    ) -> Offer:
        """
        Register a restore, and decide what to tell its task. Raises no `DstlError`: a restore must not fail for this.

        Args:
            table_id: The table that is restored.
            job_store: Its job.
            plan: Its restore plan.
            to_checkpoint: The checkpoint to which it is restored.
        """
        try:
            history = TableHistory.of(job_store, to_checkpoint)
            table = self._tables.get(table_id)
            if table is not None and table.history != history:
                if table.history.job_uid == history.job_uid and table.history.branch > history.branch:
                    return Offer()  # a restore of a branch given up by a rewind has no information
                table.let_go()
                self._drop(table_id)
                table = None
            manifest = job_store.remembered(to_checkpoint)
            if manifest is None:
                manifest = await self._shared.in_thread(lambda: next(job_store.chain(to_checkpoint)))
                table = table or self._tables.get(table_id)
            if table is None:
                if not self._has_room(table_id.job, manifest.operators):
                    return Offer()
                table = self._add(table_id, history)
                if not plan.is_full:
                    # Another process counted the log so far; from here on this one does.
                    key = (table_id.operator, table_id.key_groups)
                    plan = await self._shared.in_thread(plan_restore, job_store, *key, None, to_checkpoint)
            elif table.history != history:  # added meanwhile, by a restore of another branch
                return Offer()
            table.count_log(plan)
            await table.follow(job_store, manifest)
            if self._shared.settings.enabled:
                await table.look_at_foreign(manifest)
            is_asked = table.ask(to_checkpoint, self._replay_bytes_per_s)
            return Offer(is_asked, table.own.report(to_checkpoint) if table.own is not None else None)
        except DstlError as error:
            logger.warning("materialization not considered", extra={**table_id.names, "error": str(error)})
            return Offer()

    async def take(
        self, table_id: TableId, job_store: JobStore, version: CheckpointRef, path: str, *, is_own: bool = False
    ) -> None:
        """
        Take over a snapshot: store it in the background once it is listed, then remove its folder.

        Args:
            table_id: The snapshot's table.
            job_store: Its job.
            version: The checkpoint of the table's content.
            path: The folder. Taking the same one again changes nothing.
            is_own: Whether it must lie where the job's own tables do.

        Raises:
            ConflictError: Another snapshot of this table is being stored, and this one counts as skipped; or this is no
                table of the job's, to judge by their number.
            InvalidInputError: The folder cannot be taken over.
            NotFoundError: The checkpoint does not exist.
        """
        table = self._tables.get(table_id)
        if table is None:
            operators = (await self._shared.in_thread(job_store.resolve, version)).operators
            if not self._has_room(table_id.job, operators):
                raise ConflictError(f"job {table_id.job!r} has more tables here than partitions", **table_id.names)
            table = self._tables.get(table_id) or self._add(table_id, TableHistory.of(job_store, version))
        await table.take(job_store, version, path, is_own=is_own)
        if table.waits_to_be_listed and table_id.job not in self._watches:
            self._watches[table_id.job] = asyncio.get_running_loop().create_task(self._watch(table_id.job, job_store))

    async def choose(
        self, job: str, job_store: JobStore, base: CheckpointRef | None, reported: Sequence[dict[str, Any]]
    ) -> Reported:
        """
        Decide on the snapshots that tasks reported to the checkpoint after `base`.

        Raises no `DstlError`, and delays the checkpoint only briefly: snapshots left out are reported again.
        """
        if not reported or base is None:
            return Reported()
        choose = partial(choose_materializations, job_store, job, base, reported, self._shared.clock, _CHOICE_MS)
        try:
            chosen = await asyncio.wait_for(self._shared.in_thread(choose), _CHOICE_HUNG_S)
        except (DstlError, TimeoutError) as error:
            logger.warning("materializations postponed to a later checkpoint", extra={"job": job, "error": repr(error)})
            return Reported()
        for handle in chosen.taken:
            self.metrics.named.labels(job, handle.operator).inc()
        self.metrics.refused.labels(job).inc(chosen.refusals)
        return chosen

    def replayed(self, size_bytes: int, duration_ms: int) -> None:
        """Measure how fast a log is applied; logs below 1 MiB are ignored."""
        if size_bytes >= _MEASURED_BYTES_MIN and duration_ms > 0:
            measured = size_bytes * 1000 / duration_ms
            self._replay_bytes_per_s += (measured - self._replay_bytes_per_s) / 2

    async def close(self) -> None:
        """Stop; a later materialization replaces unfinished ones."""
        tasks = [*self._shared.uploads, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for table in self._tables.values():
            table.close()

    def _add(self, table_id: TableId, history: TableHistory) -> TrackedTable:
        table = self._tables[table_id] = TrackedTable(table_id, history, self._shared)
        self._tables_of[table_id.job] += 1
        return table

    def _sweep(self) -> None:
        """Drop tables that no restore has named for long, and the counts of operators that have none left here."""
        now_ms = self._shared.clock.monotonic_ms()
        if now_ms >= self._swept_ms + _SWEEP_MS:  # checking all tables for each one would take quadratic time
            self._swept_ms = now_ms
            stale = [table_id for table_id, table in self._tables.items() if table.schedule.is_stale(now_ms)]
            for table_id in stale:
                self._drop(table_id)
            left = {(table_id.job, table_id.operator) for table_id in self._tables}
            self.metrics.forget({(table_id.job, table_id.operator) for table_id in stale} - left)

    def _drop(self, table_id: TableId) -> None:
        del self._tables[table_id]
        self._tables_of[table_id.job] -= 1
        if not self._tables_of[table_id.job]:
            del self._tables_of[table_id.job]

    def _has_room(self, job: str, operators: Iterable[OperatorInfo]) -> bool:
        """Say whether another table of a job may be kept: a caller may name any operator and key groups."""
        self._sweep()
        partitions = sum(operator.parallelism for operator in operators if operator.has_table)
        tables = self._tables_of[job]
        is_share = shares_of(TABLES_MAX).admits(tables, 1, TABLES_MAX - len(self._tables))
        return is_share and tables < TABLES_MIN + TABLES_PER_PARTITION * partitions

    async def _watch(self, job: str, job_store: JobStore) -> None:
        """Poll whether a checkpoint lists waiting snapshots; after a job's last batch no restore tells it."""
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                tables = (table for table_id, table in self._tables.items() if table_id.job == job)
                waiting = [table for table in tables if table.waits_to_be_listed]
                if not waiting:
                    return
                try:
                    newest = await self._shared.in_thread(job_store.newest)
                    for table in waiting:
                        if newest is not None:
                            await table.follow(job_store, newest)
                        table.let_go_if_late()
                except DstlError as error:
                    logger.warning("the newest checkpoint could not be read", extra={"job": job, "error": str(error)})
        finally:
            del self._watches[job]

    def _gauges(self) -> GaugeValues:
        now_ms = self._shared.clock.monotonic_ms()
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
