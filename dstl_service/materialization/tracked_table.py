"""
Materialization of one table of this host: its schedule, and the one snapshot that is pending at a time.

A snapshot is asked for when the schedule says so, announced, and taken over as a folder. It is stored once a checkpoint
lists it, and offered until a checkpoint names it, or given up when one drops it. A failure ends one materialization,
and nothing else.

All methods run on the event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from dstl_service.formats.manifest import Manifest
from dstl_service.formats.materialization_index import find_index
from dstl_service.formats.under_way import Announcement, UnderWaySnapshot
from dstl_service.materialization.pending import ForeignSnapshot, PendingSnapshot, TableHistory
from dstl_service.materialization.policy import MaterializationSettings, Schedule
from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.materialization.snapshot_uploader import KnownFiles, SnapshotUploader, StoredSnapshot
from dstl_service.materialization.table_file_check import DamagedFileError
from dstl_service.metrics.materialization import MaterializationMetrics
from dstl_service.registry.job_store import JobStore
from dstl_service.restore.plan import RestorePlan
from dstl_service.restore.table_id import TableId
from dstl_service.wire import CheckpointRef
from storage.clock import Clock, IdSource
from storage.errors import ConflictError, DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")
_CHANCE_BITS = 32
_UNLISTED_MS_MAX = 24 * 3_600_000
"""How long a folder is held for a checkpoint to list it; a batch may take hours."""
_LOOKS_PER_INTERVAL = 10


@dataclass(frozen=True, slots=True)
class Shared:
    """
    The parts that the tables of a host share.

    Args:
        settings: When to materialize, and how fast.
        store: Receives the snapshots.
        clock: For times and delays.
        ids: Names materializations; source of randomness.
        executor: Runs blocking calls; one that hangs must not take a thread from others.
        uploader: Stores snapshots.
        metrics: Metrics of materialization.
        uploads: The running uploads.
    """

    settings: MaterializationSettings
    store: ObjectStore
    clock: Clock
    ids: IdSource
    executor: Executor
    uploader: SnapshotUploader
    metrics: MaterializationMetrics
    uploads: set[asyncio.Task[None]] = field(default_factory=set)

    async def in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a blocking call."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, partial(function, *args))


class TrackedTable:
    """
    One table of this host.

    Args:
        table_id: The table.
        history: The history of its state; another history is another instance.
        shared: The parts that the tables of the host share.
    """

    def __init__(self, table_id: TableId, history: TableHistory, shared: Shared) -> None:
        chance = int(shared.ids.unique_id()[-_CHANCE_BITS // 4 :], 16) / 2**_CHANCE_BITS
        self.id = table_id
        self.history = history
        self.schedule = Schedule(shared.settings, shared.clock.monotonic_ms(), chance)
        self.own: PendingSnapshot | None = None
        self._foreign: ForeignSnapshot | None = None
        self._is_damaged = False
        self._known: KnownFiles = {}
        self._shared = shared
        # How long to wait for another process's snapshot; it grows, or two hosts would undo each other's.
        self._patience_ms = shared.settings.interval_s * 1000

    @property
    def waits_to_be_listed(self) -> bool:
        """Whether a snapshot was handed over and is not being stored."""
        return self.own is not None and self.own.folder is not None and self.own.storing is None

    def trusted(self, from_checkpoint: CheckpointRef) -> CheckpointRef | None:
        """Return `from_checkpoint`; once None after a snapshot showed that the table's files are damaged."""
        if not self._is_damaged:
            return from_checkpoint
        self._is_damaged = False
        return None

    def count_log(self, plan: RestorePlan) -> None:
        """Count the log that a restore replays, and the size of its snapshots."""
        sizes: defaultdict[int, int] = defaultdict(int)
        for handle in plan.handles:
            sizes[handle.entry.id.checkpoint_id] += handle.entry.size_bytes
        for checkpoint_id, size_bytes in sorted(sizes.items()):
            self.schedule.logged(checkpoint_id, size_bytes)
        if plan.materializations:
            largest = max(item.handle.size_bytes for item in plan.materializations)
            self.schedule.table_bytes = max(self.schedule.table_bytes, largest)

    def ask(self, version: CheckpointRef, replay_bytes_per_s: float) -> bool:
        """Return whether its task is to make a snapshot at `version` now; if so, one is announced."""
        schedule, now_ms = self.schedule, self._now_ms()
        if schedule.is_unanswered(now_ms):
            logger.warning("a task did not hand over the requested snapshot", extra=self.id.names)
            self.own = None
            self._failed()
        if self.own is not None and self.own.stored is not None:
            return False
        if self._foreign is not None and now_ms - self._foreign.since_ms < self._patience_ms:
            return False  # another process may be storing it; a dead one's is announced again
        skipped = schedule.skipped
        trigger = schedule.ask(now_ms, replay_bytes_per_s)
        self._shared.metrics.skipped.labels(*self._labels).inc(schedule.skipped - skipped)
        if trigger is None:
            return False
        if self._foreign is not None:
            self._patience_ms *= 2
        self._shared.metrics.triggered.labels(*self._labels, trigger.value).inc()
        logger.info("materialization due", extra={**self.id.names, "trigger": trigger.value})
        self._begin(version)
        return True

    async def take(self, job_store: JobStore, version: CheckpointRef, path: str, *, is_own: bool) -> None:
        """Take over a snapshot's folder, see `Materializer.take`."""
        own = self.own
        if own is not None and own.path == path:
            return
        if own is not None and (own.path is not None or own.stored is not None):
            self._shared.metrics.skipped.labels(*self._labels).inc()
            raise ConflictError("another snapshot of this table is being stored", **self.id.names)
        if own is None or own.announcement.snapshot.version != version:
            own = self._begin(version)
        own.path = path
        try:
            await self._shared.in_thread(job_store.resolve, version)
            above = (job_store.job_uid, self.id.operator, self.id.key_groups.to_text()) if is_own else None
            own.folder = await self._shared.in_thread(SnapshotFolder.open, path, self._shared.settings.root, above)
        except BaseException as error:
            self._give_up(own, error)
            raise
        if self.own is not own:  # given up meanwhile
            self._remove_folder(own)
            return
        self.schedule.begin(self._now_ms(), version.id)
        self._shared.metrics.started.labels(*self._labels).inc()
        self._store_if_listed(job_store)

    async def follow(self, job_store: JobStore, manifest: Manifest) -> None:
        """Update the pending snapshot from a completed checkpoint: listed, taken or dropped."""
        own = self.own
        if own is None or manifest.id <= own.announcement.base.id:
            return  # an older checkpoint tells nothing
        if own.uid in manifest.under_way.uids:
            own.listed_at = own.listed_at or manifest.ref
            self._store_if_listed(job_store)
        elif own.listed_at is not None:
            state = await self._shared.in_thread(job_store.state, manifest.ref)
            if self.own is not own:
                return
            if any(handle.uid == own.uid for handle in state.materializations):
                self.own = None
                self.schedule.named()
                self._patience_ms = self._shared.settings.interval_s * 1000
            else:
                self.let_go()
        elif own.folder is not None:
            await self._announce_again(own, job_store, manifest)

    async def look_at_foreign(self, manifest: Manifest) -> None:
        """Adopt a snapshot that an earlier process or another host has stored, if its index exists."""
        listed = manifest.under_way.snapshot_of(self.id.operator, self.id.key_groups)
        if listed is None or self.own is not None:
            self._foreign = None
            return
        now_ms = self._now_ms()
        foreign = self._foreign
        if foreign is not None and foreign.uid == listed.uid:
            if now_ms - foreign.looked_ms < self._shared.settings.interval_s * 1000 // _LOOKS_PER_INTERVAL:
                return
            foreign.looked_ms = now_ms
        else:
            self._foreign = ForeignSnapshot(listed.uid, now_ms, now_ms)
        where = (self.id.job, self.id.operator, self.id.key_groups, listed.uid)
        index = await self._shared.in_thread(find_index, self._shared.store, *where)
        if index is None or self.own is not None:
            return
        own = PendingSnapshot(Announcement(listed, listed.version), now_ms, listed_at=manifest.ref)
        own.stored = index.handle(self.id.job)
        self.own, self._foreign = own, None
        self.schedule.completed(now_ms, own.stored.size_bytes)
        logger.info("stored materialization found", extra={**self.id.names, "uid": own.uid})

    def let_go(self) -> None:
        """Give up the pending snapshot, which no checkpoint will take; another one is made when due."""
        own, self.own = self.own, None
        if own is None:
            return
        logger.warning("no checkpoint accepted the materialization", extra={**self.id.names, "uid": own.uid})
        now_ms = self._now_ms()
        must_report = self.schedule.untaken(now_ms) if own.stored is not None else self.schedule.failed(now_ms)
        self._count_failure(must_report=must_report)
        if own.storing is not None:
            own.storing.cancel()
        self._remove_folder(own)

    def let_go_if_late(self) -> None:
        """Give up a snapshot that no checkpoint has listed for a day."""
        own = self.own
        if own is not None and own.listed_at is None and self._now_ms() - own.since_ms > _UNLISTED_MS_MAX:
            self.let_go()

    def close(self) -> None:
        """Remove the folder of the pending snapshot; its upload was cancelled before."""
        if self.own is not None:
            self._remove_folder(self.own)

    def _begin(self, version: CheckpointRef) -> PendingSnapshot:
        """Announce a snapshot at `version` to the checkpoint that follows it."""
        snapshot = UnderWaySnapshot(self.id.operator, self.id.key_groups, version, self._shared.ids.unique_id())
        self.own = PendingSnapshot(Announcement(snapshot, version), self._now_ms())
        return self.own

    async def _announce_again(self, own: PendingSnapshot, job_store: JobStore, manifest: Manifest) -> None:
        """Announce a snapshot that the checkpoint after its base does not list to the next one, if it still fits."""
        is_free = manifest.under_way.snapshot_of(self.id.operator, self.id.key_groups) is None
        version = own.announcement.snapshot.version
        is_ancestor = await self._shared.in_thread(job_store.is_ancestor, version, manifest.ref)
        if self.own is not own or own.listed_at is not None:
            return
        if is_free and is_ancestor:  # else another host is storing one, or a rewind gave the table's checkpoint up
            # A uid is announced for one base only, so it enters the list at most once: a new base needs a new uid.
            snapshot = replace(own.announcement.snapshot, uid=self._shared.ids.unique_id())
            own.announcement = Announcement(snapshot, manifest.ref)
        else:
            self.let_go()

    def _store_if_listed(self, job_store: JobStore) -> None:
        own = self.own
        if own is None or own.listed_at is None or own.folder is None or own.storing is not None:
            return
        own.storing = asyncio.get_running_loop().create_task(self._store(job_store, own, own.listed_at, own.folder))
        self._shared.uploads.add(own.storing)
        own.storing.add_done_callback(self._shared.uploads.discard)

    async def _store(
        self, job_store: JobStore, own: PendingSnapshot, base: CheckpointRef, folder: SnapshotFolder
    ) -> None:
        started_ms, snapshot = self._now_ms(), own.announcement.snapshot
        try:
            stored = await self._shared.uploader.store(self.id, job_store, snapshot, base, folder, self._known)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the table without materialization for ever
            self._give_up(own, error)
        else:
            if self.own is own:  # else given up while the last object was uploaded
                self._stored(own, stored, started_ms)
        finally:
            self._remove_folder(own)

    def _stored(self, own: PendingSnapshot, stored: StoredSnapshot, started_ms: int) -> None:
        now_ms, metrics = self._now_ms(), self._shared.metrics
        own.stored = stored.handle
        self.schedule.completed(now_ms, stored.handle.size_bytes)
        metrics.completed.labels(*self._labels).inc()
        metrics.uploaded_bytes.labels(*self._labels).inc(stored.uploaded_bytes)
        metrics.reused_bytes.labels(*self._labels).inc(stored.reused_bytes)
        metrics.seconds.observe((now_ms - started_ms) / 1000)
        logger.info(
            "materialization stored",
            extra={
                **self.id.names,
                "checkpoint_id": own.announcement.snapshot.version.id,
                "uid": stored.handle.uid,
                "uploaded_bytes": stored.uploaded_bytes,
                "reused_bytes": stored.reused_bytes,
                "duration_ms": now_ms - started_ms,
            },
        )

    def _remove_folder(self, own: PendingSnapshot) -> None:
        folder, own.folder = own.folder, None
        if folder is not None:
            # Not awaited: this may run while the service stops.
            self._shared.executor.submit(folder.remove)

    def _give_up(self, own: PendingSnapshot, error: BaseException) -> None:
        facts = {**self.id.names, "error": str(error)}
        if isinstance(error, DamagedFileError):
            logger.error("a damaged local table will be restored", extra=facts)
            self._shared.metrics.damaged.labels(*self._labels).inc()
            self._is_damaged = True
        elif isinstance(error, DstlError):
            logger.warning("materialization failed", extra=facts)
        elif isinstance(error, Exception):
            logger.error("materialization failed", extra=self.id.names, exc_info=error)
        if self.own is own:
            self.own = None
            self._failed()

    def _failed(self) -> None:
        self._count_failure(must_report=self.schedule.failed(self._now_ms()))

    def _count_failure(self, *, must_report: bool) -> None:
        self._shared.metrics.failed.labels(*self._labels).inc()
        if must_report:
            self._shared.metrics.failures_reported.labels(*self._labels).inc()
            logger.error(
                "materialization keeps failing; checkpoints go on, the log grows",
                extra={**self.id.names, "failures": self.schedule.failures},
            )

    @property
    def _labels(self) -> tuple[str, str]:
        return self.id.job, self.id.operator

    def _now_ms(self) -> int:
        return self._shared.clock.monotonic_ms()
