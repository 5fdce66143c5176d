"""
What a coordinator does for a job behind its checkpoints: compacts the log, and deletes what was subsumed.

Nothing here is waited for by a checkpoint, and any of it may fail: a compaction is tried again when the log has grown,
and what was not deleted is found by the garbage collector. A compaction's result waits here until the next checkpoint
takes it in. Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dstl_service.compactor import Compactor
from dstl_service.deletion import Deleted, delete_subsumed
from dstl_service.job_store import JobStore
from dstl_service.log_compaction import (
    Compaction,
    CompactionSettings,
    LogSize,
    Replacement,
    apply,
    choose_compactions,
    log_size,
)
from dstl_service.manifest import Manifest, StateView
from dstl_service.metrics import ServiceMetrics
from dstl_service.retention import RetentionBook, RetentionSettings
from storage.clock import Clock
from storage.errors import DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class _Findings:
    """
    What a checkpoint's state tells.

    Args:
        sizes: By operator.
        stale: Results of compactions that no later checkpoint can take in.
        chosen: Compactions that are due, if none runs and no result waits.
    """

    sizes: Mapping[str, LogSize]
    stale: Sequence[Replacement]
    chosen: Sequence[Compaction]


class Maintenance:
    """The background work of one job in its coordinator."""

    def __init__(
        self,
        job: str,
        jobs: JobStore,
        store: ObjectStore,
        compactor: Compactor,
        clock: Clock,
        metrics: ServiceMetrics,
        in_thread: Callable[..., Awaitable[Any]],
        compaction: CompactionSettings,
        retention: RetentionSettings,
        result_age_max_ms: int,
    ) -> None:
        self._job = job
        self._jobs = jobs
        self._store = store
        self._compactor = compactor
        self._clock = clock
        self._metrics = metrics
        self._in_thread = in_thread
        self._compaction_settings = compaction
        self._book = RetentionBook(retention)
        # What no checkpoint took in for longer is dropped: the collector may take its objects for orphans.
        self._result_age_max_ms = result_age_max_ms
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

    def replace(self, view: StateView) -> StateView:
        """
        Return the view with the compactions that were done and fit it; may run in a thread.

        May be called again with the same view: a result is forgotten only behind a checkpoint.
        """
        for replacement in self._replacements:
            view = self._applied(view, replacement) or view
        return view

    def checkpoint_completed(self, manifest: Manifest) -> None:
        """Learn of a new checkpoint; the work that follows from it runs on its own."""
        named = set(manifest.earlier)
        self._replacements = tuple(r for r in self._replacements if not named.issuperset(r.added))
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
            chain = await self._in_thread(lambda: list(self._jobs.stored_chain(manifest.ref)))
            self._book.begin(chain)
        else:
            self._book.completed(manifest, self._clock.monotonic_ms())
        # A later epoch that goes on from the very checkpoint before was preceded by no rewind: what waits still holds.
        self._epoch = manifest.epoch
        self._metrics.waiting_deletions.labels(self._job).set(self._book.waiting)
        if self._completed:
            return  # a newer checkpoint is there already
        is_idle = self._compaction is None or self._compaction.done()
        found: _Findings = await self._in_thread(partial(self._look, manifest, self._replacements, is_idle=is_idle))
        for operator, size in found.sizes.items():
            self._metrics.log_bytes.labels(self._job, operator).set(size.log_bytes)
            self._metrics.table_bytes.labels(self._job, operator).set(size.table_bytes)
        self._replacements = tuple(r for r in self._replacements if r not in found.stale)
        due = [
            compaction
            for compaction in found.chosen
            # After a failure the log must double before the next try.
            if found.sizes[compaction.operator].log_bytes >= 2 * self._failed_log_bytes.get(compaction.operator, 0)
        ]
        if due:
            work = self._run_compactions(manifest.epoch, due, found.sizes)
            self._compaction = asyncio.get_running_loop().create_task(work)

    def _look(self, manifest: Manifest, waiting: Sequence[Replacement], *, is_idle: bool) -> _Findings:
        """Look through a checkpoint's state, which may be long; runs in a thread."""
        view = self._jobs.state(manifest.ref)
        sizes = {operator.name: log_size(view, operator.name) for operator in manifest.operators}
        stale = [replacement for replacement in waiting if self._applied(view, replacement) is None]
        chosen: list[Compaction] = []
        if is_idle and len(stale) == len(waiting):  # else the last result has to come in first
            chosen = choose_compactions(
                view, manifest.operators, sizes, manifest.id, self._jobs.max_parallelism, self._compaction_settings
            )
        return _Findings(sizes, stale, chosen)

    def _applied(self, view: StateView, replacement: Replacement) -> StateView | None:
        """Return the view with a compaction's result, or None if the result is too old or does not fit it."""
        if replacement.made_ms < self._clock.now_ms() - self._result_age_max_ms:
            return None
        return apply(view, replacement)

    async def _run_compactions(self, epoch: int, due: Sequence[Compaction], sizes: Mapping[str, LogSize]) -> None:
        before = sum(handle.entry.size_bytes for compaction in due for handle in compaction.inputs)
        started_ms = self._clock.monotonic_ms()
        try:
            made = await self._compactor.run(self._job, epoch, due)
        except Exception as error:
            if not isinstance(error, DstlError):
                logger.exception("compaction failed", extra={"job": self._job})
            else:
                logger.warning("compaction failed", extra={"job": self._job, "error": str(error)})
            self._metrics.compactions_failed.labels(self._job).inc()
            for compaction in due:
                self._failed_log_bytes[compaction.operator] = sizes[compaction.operator].log_bytes
            return
        after = sum(handle.entry.size_bytes for replacement in made for handle in replacement.added)
        self._metrics.compactions.labels(self._job).inc()
        self._metrics.compacted_bytes.labels(self._job).inc(before)
        self._metrics.compaction_seconds.observe((self._clock.monotonic_ms() - started_ms) / 1000)
        logger.info("log compacted", extra={"job": self._job, "bytes_before": before, "bytes_after": after})
        self._failed_log_bytes.clear()
        self._replacements = (*self._replacements, *made)

    async def _delete_subsumed(self) -> None:
        due = self._book.take_due(self._clock.monotonic_ms())
        if not due:
            return
        deleted: Deleted = await self._in_thread(
            delete_subsumed, self._store, self._jobs, due, self._book.spared, self._epoch
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
