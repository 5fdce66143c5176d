"""
Materialization on a sidecar: asks tasks for due snapshots, and stores them in the background (I13).

A restore tells a table's version and the size of its log, so each is a chance to ask its task for a snapshot. The task
hands over a folder of hard links and continues. Nothing is put before a checkpoint lists the snapshot as under way
(`dstl_service.formats.under_way`): its announcement, and once it is stored its handle, travels with a restore to a
task, with that task's receipt to the driver, and from there to the coordinator, until a checkpoint has it. A snapshot
dropped from the list is given up. If this process ends, the next one finds the snapshot in the list, and offers it if
its index exists. A failure ends one materialization, and nothing else.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from dstl_service.formats.manifest import Manifest
from dstl_service.formats.materialization_index import find_index
from dstl_service.formats.under_way import Announcement, UnderWaySnapshot
from dstl_service.materialization.admission import Reported, choose_materializations
from dstl_service.materialization.pending import ForeignSnapshot, Offer, PendingSnapshot, TableHistory, TrackedTable
from dstl_service.materialization.policy import MaterializationSettings, Schedule
from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.materialization.snapshot_uploader import SnapshotUploader, TableId
from dstl_service.materialization.table_file_check import DamagedFileError
from dstl_service.metrics.materialization import GaugeValues, MaterializationMetrics
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import RestorePlan, plan_restore
from dstl_service.wire import CheckpointRef
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")
_MEASURED_BYTES_MIN = 1 << 20
_CHANCE_BITS = 32
_CHOICE_MS = 500
"""How long the coordinator checks reported handles while the checkpoint's sets become durable."""
_CHOICE_HUNG_S = 2.0
_LOOK_S = 10.0
"""Interval of the check whether a checkpoint lists waiting snapshots; no restore tells it after a job's last batch."""
_UNLISTED_MS_MAX = 24 * 3_600_000
"""How long a folder is held for a checkpoint to list it; a batch may take hours."""
_LOOKS_PER_INTERVAL = 10


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
        self._settings = settings
        self._store = store
        self._clock = clock
        self._ids = ids
        self._executor = executor
        self._uploader = SnapshotUploader(settings, store, clock, executor)
        self._tables: dict[TableId, TrackedTable] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_bytes_per_s = float(settings.replay_bytes_per_s)
        self.metrics = MaterializationMetrics(registry, self._gauges)

    @property
    def is_busy(self) -> bool:
        """Whether a snapshot is being stored."""
        return bool(self._tasks)

    def trusted(self, table_id: TableId, have: CheckpointRef | None) -> CheckpointRef | None:
        """
        Return the version from which a table may advance; None if it must be restored, since its files are damaged.

        None is returned once, to the first task with a version. If that had another slot's table, or never got the
        answer, the table's next snapshot shows the damage again, and is not stored either.
        """
        table = self._tables.get(table_id)
        if table is None or have is None or not table.is_damaged:
            return have
        table.is_damaged = False
        return None

    async def offer(self, table_id: TableId, job_store: JobStore, plan: RestorePlan, want: CheckpointRef) -> Offer:
        """
        Register a restore, and decide what to tell its task. Raises no `DstlError`: a restore must not fail for this.

        Args:
            table_id: The table that is restored.
            job_store: Its job.
            plan: Its restore plan.
            want: The checkpoint to which it is restored.
        """
        try:
            history = TableHistory.of(job_store, want)
            table = self._tables.get(table_id)
            if table is not None and table.history != history:
                if table.history.job_uid == history.job_uid and table.history.branch > history.branch:
                    return Offer()  # a restore of a branch given up by a rewind has no information
                self._forget(table_id, table)
                table = None
            if table is None:
                table = self._add(table_id, history)
                if not plan.is_full:
                    # Another process counted the log so far; from here on this one does.
                    key = (table_id.operator, table_id.key_groups)
                    plan = await self._in_thread(plan_restore, job_store, *key, None, want)
            self._count_log(table.schedule, plan)
            manifest = job_store.remembered(want)
            if manifest is None:
                manifest = await self._in_thread(lambda: next(job_store.chain(want)))
            await self._follow(table_id, table, job_store, manifest)
            if self._settings.enabled:
                await self._look_at_foreign(table_id, table, manifest)
            is_asked = self._ask(table_id, table)
            if is_asked:
                table.own = self._begun(table_id, want)
            return Offer(is_asked, table.own.report(want) if table.own is not None else None)
        except DstlError as error:
            logger.warning("materialization not considered", extra={**_names(table_id), "error": str(error)})
            return Offer()

    async def take(self, table_id: TableId, job_store: JobStore, version: CheckpointRef, path: str) -> None:
        """
        Take over a snapshot: store it in the background once it is listed, then remove its folder.

        Args:
            table_id: The snapshot's table.
            job_store: Its job.
            version: The checkpoint of the table's content.
            path: The folder. Taking the same one again changes nothing.

        Raises:
            ConflictError: Another snapshot of this table is being stored; this one counts as skipped.
            InvalidInputError: The folder cannot be taken over.
            NotFoundError: The checkpoint does not exist.
        """
        table = self._tables.get(table_id) or self._add(table_id, TableHistory.of(job_store, version))
        own = table.own
        if own is not None and own.path == path:
            return
        if own is not None and (own.path is not None or own.stored is not None):
            self.metrics.skipped.labels(table_id.job, table_id.operator).inc()
            raise ConflictError("another snapshot of this table is being stored", **_names(table_id))
        if own is None or own.announcement.snapshot.version != version:
            own = table.own = self._begun(table_id, version)
        own.path = path
        try:
            await self._in_thread(job_store.resolve, version)
            own.folder = await self._in_thread(SnapshotFolder.open, path, self._settings.root)
        except BaseException as error:
            self._give_up(table_id, table, own, error)
            raise
        if table.own is not own:  # given up meanwhile
            self._discard_folder(own)
            return
        table.schedule.begin(self._clock.monotonic_ms(), version.id)
        self.metrics.started.labels(table_id.job, table_id.operator).inc()
        self._store_if_listed(table_id, table, job_store)
        if own.storing is None and table_id.job not in self._watches:
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
        choose = partial(choose_materializations, job_store, job, base, reported, self._clock, _CHOICE_MS)
        try:
            chosen = await asyncio.wait_for(self._in_thread(choose), _CHOICE_HUNG_S)
        except (DstlError, TimeoutError) as error:
            logger.warning("materializations left to a later checkpoint", extra={"job": job, "error": repr(error)})
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
        tasks = [*self._tasks, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for table in self._tables.values():
            if table.own is not None:
                self._discard_folder(table.own)

    def _forget(self, table_id: TableId, table: TrackedTable) -> None:
        if table.own is not None:
            self._let_go(table_id, table, table.own)
        del self._tables[table_id]

    def _add(self, table_id: TableId, history: TableHistory) -> TrackedTable:
        now_ms = self._clock.monotonic_ms()
        for other_id in [other for other, table in self._tables.items() if table.schedule.is_stale(now_ms)]:
            del self._tables[other_id]
        chance = int(self._ids.unique_id()[-_CHANCE_BITS // 4 :], 16) / 2**_CHANCE_BITS
        table = self._tables[table_id] = TrackedTable(
            history, Schedule(self._settings, now_ms, chance), self._settings.interval_s * 1000
        )
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

    def _begun(self, table_id: TableId, version: CheckpointRef) -> PendingSnapshot:
        """Return a snapshot of a table at `version`, announced to the checkpoint that follows it."""
        snapshot = UnderWaySnapshot(table_id.operator, table_id.key_groups, version, self._ids.unique_id())
        return PendingSnapshot(Announcement(snapshot, version), self._clock.monotonic_ms())

    async def _follow(self, table_id: TableId, table: TrackedTable, job_store: JobStore, manifest: Manifest) -> None:
        """Update the table's snapshot from a completed checkpoint: listed, taken or dropped."""
        own = table.own
        if own is None or manifest.id <= own.announcement.base.id:
            return  # an older checkpoint tells nothing
        if own.uid in manifest.under_way.uids:
            own.listed_at = own.listed_at or manifest.ref
            self._store_if_listed(table_id, table, job_store)
        elif own.listed_at is not None:
            state = await self._in_thread(job_store.state, manifest.ref)
            if table.own is not own:
                return
            if any(handle.uid == own.uid for handle in state.materializations):
                table.own = None
                table.schedule.named()
                table.patience_ms = self._settings.interval_s * 1000
            else:
                self._let_go(table_id, table, own)
        elif own.folder is not None:
            is_free = manifest.under_way.snapshot_of(table_id.operator, table_id.key_groups) is None
            is_ancestor = await self._in_thread(job_store.is_ancestor, own.announcement.snapshot.version, manifest.ref)
            if table.own is not own or own.listed_at is not None:
                return
            if is_free and is_ancestor:  # else another host is storing one, or a rewind gave the table's checkpoint up
                # A uid is announced for one base only, so it enters the list at most once: a new base needs a new uid.
                snapshot = replace(own.announcement.snapshot, uid=self._ids.unique_id())
                own.announcement = Announcement(snapshot, manifest.ref)
            else:
                self._let_go(table_id, table, own)

    def _store_if_listed(self, table_id: TableId, table: TrackedTable, job_store: JobStore) -> None:
        own = table.own
        if own is None or own.listed_at is None or own.folder is None or own.storing is not None:
            return
        store = self._store_snapshot(table_id, table, job_store, own, own.listed_at, own.folder)
        own.storing = asyncio.get_running_loop().create_task(store)
        self._tasks.add(own.storing)
        own.storing.add_done_callback(self._tasks.discard)

    def _let_go(self, table_id: TableId, table: TrackedTable, own: PendingSnapshot) -> None:
        """Give up a snapshot that no checkpoint will take; another one is made when due."""
        logger.warning("materialization was taken by no checkpoint", extra={**_names(table_id), "uid": own.uid})
        table.own = None
        now_ms = self._clock.monotonic_ms()
        must_report = table.schedule.untaken(now_ms) if own.stored is not None else table.schedule.failed(now_ms)
        self._count_failure(table_id, table, must_report=must_report)
        if own.storing is not None:
            own.storing.cancel()
        self._discard_folder(own)

    async def _look_at_foreign(self, table_id: TableId, table: TrackedTable, manifest: Manifest) -> None:
        """Adopt a snapshot that an earlier process or another host has stored, if its index exists."""
        listed = manifest.under_way.snapshot_of(table_id.operator, table_id.key_groups)
        if listed is None or table.own is not None:
            table.foreign = None
            return
        now_ms = self._clock.monotonic_ms()
        foreign = table.foreign
        if foreign is not None and foreign.uid == listed.uid:
            if now_ms - foreign.looked_ms < self._settings.interval_s * 1000 // _LOOKS_PER_INTERVAL:
                return
            foreign.looked_ms = now_ms
        else:
            table.foreign = ForeignSnapshot(listed.uid, now_ms, now_ms)
        where = (table_id.job, table_id.operator, table_id.key_groups, listed.uid)
        index = await self._in_thread(find_index, self._store, *where)
        if index is None or table.own is not None:
            return
        own = PendingSnapshot(Announcement(listed, listed.version), now_ms, listed_at=manifest.ref)
        own.stored = index.handle(table_id.job)
        table.own, table.foreign = own, None
        table.schedule.completed(now_ms, own.stored.size_bytes)
        logger.info("stored materialization found", extra={**_names(table_id), "uid": own.uid})

    async def _watch(self, job: str, job_store: JobStore) -> None:
        """Poll whether a checkpoint lists waiting snapshots; after a job's last batch no restore tells it."""
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                waiting = [
                    (table_id, table, table.own)
                    for table_id, table in self._tables.items()
                    if table_id.job == job and table.own and table.own.folder and table.own.storing is None
                ]
                if not waiting:
                    return
                try:
                    newest = await self._in_thread(job_store.newest)
                    for table_id, table, own in waiting:
                        if newest is not None:
                            await self._follow(table_id, table, job_store, newest)
                        is_late = self._clock.monotonic_ms() - own.since_ms > _UNLISTED_MS_MAX
                        if table.own is own and own.listed_at is None and is_late:
                            self._let_go(table_id, table, own)
                except DstlError as error:
                    logger.warning("checkpoints not looked at", extra={"job": job, "error": str(error)})
        finally:
            del self._watches[job]

    def _ask(self, table_id: TableId, table: TrackedTable) -> bool:
        schedule, now_ms = table.schedule, self._clock.monotonic_ms()
        if schedule.is_unanswered(now_ms):
            logger.warning("a task was asked for a snapshot and handed none over", extra=_names(table_id))
            table.own = None
            self._failed(table_id, table)
        if table.own is not None and table.own.stored is not None:
            return False
        if table.foreign is not None and now_ms - table.foreign.since_ms < table.patience_ms:
            return False  # another process may be storing it; a dead one's is announced again
        skipped = schedule.skipped
        trigger = schedule.ask(now_ms, self._replay_bytes_per_s)
        labels = (table_id.job, table_id.operator)
        self.metrics.skipped.labels(*labels).inc(schedule.skipped - skipped)
        if trigger is None:
            return False
        if table.foreign is not None:
            table.patience_ms *= 2
        self.metrics.triggered.labels(*labels, trigger.value).inc()
        logger.info("materialization due", extra={**_names(table_id), "trigger": trigger.value})
        return True

    async def _store_snapshot(
        self,
        table_id: TableId,
        table: TrackedTable,
        job_store: JobStore,
        own: PendingSnapshot,
        base: CheckpointRef,
        folder: SnapshotFolder,
    ) -> None:
        started_ms = self._clock.monotonic_ms()
        labels = (table_id.job, table_id.operator)
        snapshot = own.announcement.snapshot
        try:
            stored = await self._uploader.store(table_id, job_store, snapshot, base, folder, table.known)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the table without materialization for ever
            self._give_up(table_id, table, own, error)
        else:
            if table.own is not own:
                return  # given up while the last object was uploaded
            now_ms = self._clock.monotonic_ms()
            own.stored = stored.handle
            table.schedule.completed(now_ms, stored.handle.size_bytes)
            self.metrics.completed.labels(*labels).inc()
            self.metrics.uploaded_bytes.labels(*labels).inc(stored.uploaded_bytes)
            self.metrics.reused_bytes.labels(*labels).inc(stored.reused_bytes)
            self.metrics.seconds.observe((now_ms - started_ms) / 1000)
            logger.info(
                "materialization stored",
                extra={
                    **_names(table_id),
                    "checkpoint_id": snapshot.version.id,
                    "uid": stored.handle.uid,
                    "uploaded_bytes": stored.uploaded_bytes,
                    "reused_bytes": stored.reused_bytes,
                    "duration_ms": now_ms - started_ms,
                },
            )
        finally:
            self._discard_folder(own)

    def _discard_folder(self, own: PendingSnapshot) -> None:
        folder, own.folder = own.folder, None
        if folder is not None:
            # Not awaited: this may run while the service stops.
            self._executor.submit(folder.remove)

    def _give_up(self, table_id: TableId, table: TrackedTable, own: PendingSnapshot, error: BaseException) -> None:
        facts = {**_names(table_id), "error": str(error)}
        if isinstance(error, DamagedFileError):
            logger.error("a local table is damaged, and will be restored anew", extra=facts)
            self.metrics.damaged.labels(table_id.job, table_id.operator).inc()
            table.is_damaged = True
        elif isinstance(error, DstlError):
            logger.warning("materialization failed", extra=facts)
        elif isinstance(error, Exception):
            logger.error("materialization failed", extra=_names(table_id), exc_info=error)
        if table.own is own:
            table.own = None
            self._failed(table_id, table)

    def _failed(self, table_id: TableId, table: TrackedTable) -> None:
        self._count_failure(table_id, table, must_report=table.schedule.failed(self._clock.monotonic_ms()))

    def _count_failure(self, table_id: TableId, table: TrackedTable, *, must_report: bool) -> None:
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
