"""
What a coordinator does for a job behind its checkpoints: compacts the log, and deletes what was subsumed.

Nothing here is waited for by a checkpoint, and any of it may fail: a compaction is tried again when the log has grown,
and what was not deleted is found by the garbage collector. A compaction that is due begins when a checkpoint lists it
as under way (`dstl_service.formats.under_way`), and its result waits here until the next one takes it in. One whose
base does not list it any more is dropped: the job was set back. Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dstl_service.collection.deletion import Deleted, delete_subsumed
from dstl_service.collection.retention import RetentionSettings, RetentionTracker
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
from dstl_service.metrics.upkeep import UpkeepMetrics
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from storage.clock import Clock, IdSource
from storage.errors import DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class _Findings:
    """
    What a checkpoint's state tells.

    Args:
        sizes: By operator.
        chosen: Compactions that are due, if none runs and no result waits.
    """

    sizes: Mapping[str, LogSize]
    chosen: Sequence[Compaction]


class Maintenance:
    """The background work of one job in its coordinator."""

    def __init__(
        self,
        job: str,
        job_store: JobStore,
        store: ObjectStore,
        compactor: Compactor,
        clock: Clock,
        metrics: UpkeepMetrics,
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
        self._ids = ids
        self._is_due = False
        # Of the compaction that the newest checkpoint lists: it waits for its begin, runs, or has these results.
        self._uid: str | None = None
        self._begun = ""  # no uid is begun twice: its keys are written once
        self._replacements: tuple[Replacement, ...] = ()
        self._failed_log_bytes: dict[str, int] = {}
        self._completed: list[Manifest] = []
        self._epoch = 0
        self._work: asyncio.Task[None] | None = None
        self._compaction: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Say whether something is compacted or deleted."""
        return any(task is not None and not task.done() for task in (self._work, self._compaction))

    def replace(self, view: StateView, before: UnderWay) -> tuple[StateView, tuple[str, ...]]:
        """
        Return the view with the compactions that were done and fit it, and what the checkpoint lists as under way.

        May run in a thread, and may be called again for the same base: what is done is forgotten, and what is due is
        begun, only behind a checkpoint.

        Args:
            view: The state that the checkpoint's base consists of.
            before: What the base lists.
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
        """Learn of a new checkpoint; the work that follows from it runs on its own."""
        listed = manifest.under_way.compactions
        if self._uid not in listed:
            self._drop_compaction()
            self._uid = next((uid for uid in listed if uid != self._begun), None)
        self._completed.append(manifest)
        self.wake()

    def wake(self) -> None:
        """Do what is due now."""
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Stop; what was not finished is done again by a later process."""
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
            chain = await self._in_thread(self._job, lambda: list(self._job_store.stored_chain(manifest.ref)))
            self._book.begin(chain)
        else:
            self._book.completed(manifest, self._clock.monotonic_ms())
        # A later epoch that goes on from the very checkpoint before was preceded by no rewind: what waits still holds.
        self._epoch = manifest.epoch
        self._metrics.waiting_deletions.labels(self._job).set(self._book.waiting)
        if self._completed:
            return  # a newer checkpoint is there already
        is_idle = self._compaction is None and not self._replacements
        found: _Findings = await self._in_thread(self._job, partial(self._look, manifest, is_idle=is_idle))
        for operator, size in found.sizes.items():
            self._metrics.log_bytes.labels(self._job, operator).set(size.log_bytes)
            self._metrics.table_bytes.labels(self._job, operator).set(size.table_bytes)
        if not is_idle or self._compaction is not None:
            return
        due = [
            compaction
            for compaction in found.chosen
            # After a failure the log must double before the next try.
            if found.sizes[compaction.operator].log_bytes >= 2 * self._failed_log_bytes.get(compaction.operator, 0)
        ]
        self._is_due = bool(due)
        uid = self._uid
        if uid is None or uid not in manifest.under_way.compactions:
            return  # the next checkpoint lists what is due now
        self._uid = None
        if due:
            self._uid, self._begun, self._is_due = uid, uid, False
            work = self._run_compactions(manifest.epoch, uid, due, found.sizes)
            self._compaction = asyncio.get_running_loop().create_task(work)

    def _look(self, manifest: Manifest, *, is_idle: bool) -> _Findings:
        """Look through a checkpoint's state, which may be long; runs in a thread."""
        view = self._job_store.state(manifest.ref)
        sizes = {operator.name: log_size(view, operator.name) for operator in manifest.operators}
        chosen: list[Compaction] = []
        if is_idle:  # else the last result has to come in first
            chosen = choose_compactions(
                view, manifest.operators, sizes, manifest.id, self._job_store.max_parallelism, self._compaction_settings
            )
        return _Findings(sizes, chosen)

    def _drop_compaction(self) -> None:
        """Forget what a checkpoint took in, or what none is going to take."""
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
        self._failed_log_bytes.clear()
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
