"""
A coordinator's work after a job's checkpoints: compacting the log, and deleting subsumed checkpoints.

No checkpoint waits for this work, and any of it may fail: a compaction is retried when the log has grown, and the
garbage collector finds objects that were not deleted. A compaction that is due begins when a checkpoint lists it as
under way (`dstl_service.formats.under_way`), and its result waits here until the next checkpoint takes it. One whose
base no longer lists it is dropped: the job was rewound. Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from dstl_service.collection.retention import RetentionSettings, RetentionTracker, manifests_to_keep
from dstl_service.collection.subsumed_deletion import Deleted, delete_subsumed
from dstl_service.compaction.compactor import Compactor
from dstl_service.compaction.plan import (
    Compaction,
    CompactionSettings,
    LogSize,
    Replacement,
    apply,
    choose_compactions,
    log_size,
)
from dstl_service.formats.manifest import Manifest, StateView
from dstl_service.formats.under_way import UnderWay
from dstl_service.metrics.background_work import BackgroundWorkMetrics
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from storage.clock import Clock, IdSource
from storage.errors import DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")


class JobMaintenance:
    """The background work of one job in its coordinator."""

    def __init__(
        self,
        job: str,
        job_store: JobStore,
        store: ObjectStore,
        compactor: Compactor,
        clock: Clock,
        metrics: BackgroundWorkMetrics,
        in_thread: RunInThread,
        compaction: CompactionSettings,
        retention: RetentionSettings,
        ids: IdSource,
    ) -> None:
        self._job = job
        self._job_store = job_store
        self._store = store
        self._compactor = compactor
        self._clock = clock
        self._metrics = metrics
        self._in_thread = in_thread
        self._compaction_settings = compaction
        self._book = RetentionTracker(retention)
        self._checkpoints_max = retention.checkpoints_max
        self._ids = ids
        self._is_due = False
        # The compaction that the newest checkpoint lists: about to begin, running, or done with these results.
        self._uid: str | None = None
        self._begun = ""  # no uid begins twice: its keys are written once
        self._replacements: tuple[Replacement, ...] = ()
        self._failed_log_bytes: dict[str, int] = {}
        self._shown: set[str] = set()  # operators whose sizes the metrics show
        self._completed: list[Manifest] = []
        self._epoch = 0
        self._work: asyncio.Task[None] | None = None
        self._compaction: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a compaction or a deletion is running."""
        return any(task is not None and not task.done() for task in (self._work, self._compaction))

    def replace(self, view: StateView, before: UnderWay) -> tuple[StateView, tuple[str, ...]]:
        """
        Return the view with the finished compactions that fit it, and the uids that the checkpoint lists as under way.

        May run in a thread, and may be called again for the same base: finished compactions are forgotten, and due ones
        begin, only after a checkpoint.

        Args:
            view: The state of the checkpoint's base.
            before: The under-way list of the base.
        """
        uid, replacements = self._uid, self._replacements
        if uid is None:
            return view, (self._ids.unique_id(),) if self._is_due else ()
        if uid not in before.compactions:
            return view, ()
        if not replacements:
            return view, (uid,)
        for replacement in replacements:
            view = apply(view, replacement) or view
        return view, ()

    def checkpoint_completed(self, manifest: Manifest) -> None:
        """Register a new checkpoint; the resulting work runs in the background."""
        listed = manifest.under_way.compactions
        if self._uid not in listed:
            self._drop_compaction()
            self._uid = next((uid for uid in listed if uid != self._begun), None)
        self._completed.append(manifest)
        self.wake()

    def wake(self) -> None:
        """Start the work that is due, unless it is running."""
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Stop; a later process repeats unfinished work."""
        for task in (self._work, self._compaction):
            if task is not None:
                task.cancel()

    async def _run(self) -> None:
        try:
            while self._completed:
                await self._take_in(self._completed.pop(0))
            await self._delete_subsumed()
        except DstlError as error:
            logger.warning("maintenance failed", extra={"job": self._job, "error": str(error)})
        except Exception:  # a bug here must not end the checkpoints of the job
            logger.exception("maintenance failed", extra={"job": self._job})

    async def _take_in(self, manifest: Manifest) -> None:
        if manifest.base is None or self._book.newest != manifest.base:
            self._book.begin(await self._in_thread(self._job, self._kept, manifest))
        else:
            self._book.completed(manifest, self._clock.monotonic_ms())
        # A later epoch that continues from the same checkpoint was preceded by no rewind: waiting deletions stay valid.
        self._epoch = manifest.epoch
        self._metrics.waiting_deletions.labels(self._job).set(self._book.waiting)
        if self._completed:
            return  # a newer checkpoint is already complete
        is_idle = self._compaction is None and not self._replacements
        sizes, chosen = await self._in_thread(self._job, partial(self._look, manifest, is_idle=is_idle))
        self._show(sizes)
        if not is_idle or self._compaction is not None:
            return
        due = [
            compaction
            for compaction in chosen
            # After a failure, or a result in part, the log must double before the next try.
            if sizes[compaction.operator].log_bytes >= 2 * self._failed_log_bytes.get(compaction.operator, 0)
        ]
        self._is_due = bool(due)
        uid = self._uid
        if uid is None or uid not in manifest.under_way.compactions:
            return  # the next checkpoint lists the due compaction
        self._uid = None
        if due:
            self._uid, self._begun, self._is_due = uid, uid, False
            work = self._run_compactions(manifest.epoch, uid, due, sizes)
            self._compaction = asyncio.get_running_loop().create_task(work)

    def _kept(self, newest: Manifest) -> list[Manifest]:
        """Read the manifests that retention needs, and none before them: of those any number may wait to be deleted."""
        return manifests_to_keep(self._job_store.stored_chain(newest.ref), self._checkpoints_max)

    def _show(self, sizes: Mapping[str, LogSize]) -> None:
        """Set the metrics of a checkpoint's operators, and remove those of operators that it does not have any more."""
        for operator, size in sizes.items():
            self._metrics.log_bytes.labels(self._job, operator).set(size.log_bytes)
            self._metrics.table_bytes.labels(self._job, operator).set(size.table_bytes)
        for operator in self._shown - sizes.keys():
            self._metrics.log_bytes.remove(self._job, operator)
            self._metrics.table_bytes.remove(self._job, operator)
        self._shown = set(sizes)

    def _look(self, manifest: Manifest, *, is_idle: bool) -> tuple[dict[str, LogSize], list[Compaction]]:
        """Return log sizes by operator and due compactions of a checkpoint's state, which may be large; for threads."""
        view = self._job_store.state(manifest.ref)
        sizes = {operator.name: log_size(view, operator.name) for operator in manifest.operators}
        chosen: list[Compaction] = []
        if is_idle:  # else a checkpoint must take the last result first
            chosen = choose_compactions(
                view, manifest.operators, sizes, manifest.id, self._job_store.max_parallelism, self._compaction_settings
            )
        return sizes, chosen

    def _drop_compaction(self) -> None:
        """Drop a compaction that a checkpoint took, or that none will take."""
        self._replacements = ()
        if self._compaction is not None:
            self._compaction.cancel()
            self._compaction = None

    async def _run_compactions(
        self, epoch: int, uid: str, due: Sequence[Compaction], sizes: Mapping[str, LogSize]
    ) -> None:
        before = sum(handle.entry.size_bytes for compaction in due for handle in compaction.inputs)
        started_ms = self._clock.monotonic_ms()
        try:
            made = await self._compactor.run(self._job, epoch, due, uid)
        except Exception as error:
            if not isinstance(error, DstlError):
                logger.exception("compaction failed", extra={"job": self._job})
            else:
                logger.warning("compaction failed", extra={"job": self._job, "error": str(error)})
            self._metrics.compactions_failed.labels(self._job).inc()
            for compaction in due:
                self._failed_log_bytes[compaction.operator] = sizes[compaction.operator].log_bytes
            if self._uid == uid:
                self._uid = self._compaction = None
            return
        after = sum(handle.entry.size_bytes for replacement in made for handle in replacement.added)
        self._metrics.compactions.labels(self._job).inc()
        self._metrics.compacted_bytes.labels(self._job).inc(before)
        self._metrics.compaction_seconds.observe((self._clock.monotonic_ms() - started_ms) / 1000)
        logger.info("log compacted", extra={"job": self._job, "bytes_before": before, "bytes_after": after})
        partly = [replacement.compaction.operator for replacement in made if replacement.too_large]
        self._failed_log_bytes = {operator: sizes[operator].log_bytes for operator in partly}
        if self._uid == uid:
            self._replacements, self._compaction = tuple(made), None

    async def _delete_subsumed(self) -> None:
        due = self._book.take_due(self._clock.monotonic_ms())
        if not due:
            return
        deleted: Deleted = await self._in_thread(
            self._job, delete_subsumed, self._store, self._job_store, due, self._book.spared, self._epoch
        )
        if not deleted.is_owner:
            self._book.drop()
        self._metrics.subsumed.labels(self._job).inc(deleted.manifests)
        self._metrics.subsumed_objects.labels(self._job).inc(deleted.objects)
        self._metrics.waiting_deletions.labels(self._job).set(self._book.waiting)
        logger.info(
            "subsumed checkpoints deleted",
            extra={"job": self._job, "checkpoints": deleted.manifests, "objects": deleted.objects},
        )
