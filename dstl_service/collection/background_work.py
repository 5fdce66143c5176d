"""
A coordinator's background work for its jobs: the maintenance of each, and the collection of its garbage.

Kept per job while the job is known; see `ActiveJob.at_end`. Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

from dstl_service.collection.garbage_collector import GarbageReport, collect_garbage
from dstl_service.collection.job_maintenance import JobMaintenance
from dstl_service.collection.retention import RetentionSettings
from dstl_service.collection.tombstones import Deletions
from dstl_service.compaction.compactor import Compactor
from dstl_service.compaction.plan import CompactionSettings
from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.active_jobs import IDLE_MS, ActiveJobs
from dstl_service.metrics.background_work import BackgroundWorkMetrics
from dstl_service.process.job_threads import RunInThread
from storage.clock import Clock, IdSource
from storage.errors import DstlError
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class BackgroundWorkSettings:
    """
    Settings of the background work.

    Args:
        compaction: When logs are compacted.
        retention: Which checkpoints are kept.
        interval_s: Seconds between garbage collections; 0 for never.
        orphan_age_min_ms: Younger objects are not collected.
    """

    compaction: CompactionSettings
    retention: RetentionSettings
    interval_s: int
    orphan_age_min_ms: int


@dataclass(slots=True)
class _WorkOfJob:
    """The background work of one job: its maintenance, and the task that collects its garbage."""

    maintenance: JobMaintenance
    collector: asyncio.Task[None] | None = None
    collected_ms: int = 0
    """When garbage was last collected successfully, or else the collector was started; monotonic."""

    def is_running(self) -> bool:
        return self.maintenance.is_busy or (self.collector is not None and not self.collector.done())

    def close(self) -> None:
        self.maintenance.close()
        if self.collector is not None:
            self.collector.cancel()


class BackgroundWork:
    """
    Maintains the jobs of a service and collects their garbage.

    Args:
        settings: Its settings.
        jobs: The jobs of this process.
        store: Holds them.
        compactor: Compacts their logs.
        deletions: Collects deleted jobs, which have no coordinator.
        clock: Tells what is due.
        ids: Names compactions.
        metrics: The service's.
        in_thread: Runs a blocking call of a job.
    """

    def __init__(
        self,
        settings: BackgroundWorkSettings,
        jobs: ActiveJobs,
        store: ObjectStore,
        compactor: Compactor,
        deletions: Deletions,
        clock: Clock,
        ids: IdSource,
        metrics: BackgroundWorkMetrics,
        in_thread: RunInThread,
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._store = store
        self._compactor = compactor
        self._deletions = deletions
        self._clock = clock
        self._ids = ids
        self._metrics = metrics
        self._in_thread = in_thread
        self._by_job: WeakKeyDictionary[ActiveJob, _WorkOfJob] = WeakKeyDictionary()

    @property
    def is_busy(self) -> bool:
        """Whether a compaction or a deletion is running."""
        return any(care.maintenance.is_busy for care in self._by_job.values())

    def maintenance_of(self, job: ActiveJob) -> JobMaintenance:
        """Return the maintenance of a job."""
        return self.work_of(job).maintenance

    def close(self) -> None:
        """Stop; a later process repeats unfinished work."""
        for care in self._by_job.values():
            care.close()

    async def collect(self, job: ActiveJob, *, dry_run: bool) -> GarbageReport:
        """Delete a job's orphans, or only report them; see `dstl_service.collection.garbage_collector`."""
        collect = partial(
            collect_garbage,
            self._store,
            job.store,
            job.name,
            self._clock,
            age_min_ms=self._settings.orphan_age_min_ms,
            checkpoints_max=self._settings.retention.checkpoints_max,
            dry_run=dry_run,
        )
        try:
            report: GarbageReport = await self._in_thread(job.name, collect)
        except Exception:
            if not dry_run:
                self._metrics.collections_failed.labels(job.name).inc()
            raise
        self._metrics.orphans.labels(job.name).set(len(report.orphans) if dry_run else 0)
        if not dry_run:
            self.work_of(job).collected_ms = self._clock.monotonic_ms()
            self._metrics.orphans_deleted.labels(job.name).inc(len(report.orphans))
        return report

    def start_collector(self, job: ActiveJob) -> None:
        """Start the regular collection of a job's garbage, unless it is running or turned off."""
        care = self.work_of(job)
        if self._settings.interval_s <= 0 or (care.collector is not None and not care.collector.done()):
            return
        care.collected_ms = self._clock.monotonic_ms()
        self._metrics.collections_failed.labels(job.name)  # shown from the start
        self._metrics.collection_age.labels(job.name).set_function(
            lambda: (self._clock.monotonic_ms() - care.collected_ms) / 1000
        )
        care.collector = asyncio.get_running_loop().create_task(self._collect_regularly(job))

    def work_of(self, job: ActiveJob) -> _WorkOfJob:
        """Return the work for a job; it begins with the first call."""
        care = self._by_job.get(job)
        if care is None:
            care = self._by_job[job] = _WorkOfJob(self._new_maintenance(job))
            job.at_end.append(partial(self._end, job.name, care))
            job.needed_by.append(care.is_running)
        return care

    def _end(self, job: str, care: _WorkOfJob) -> None:
        """Stop the work for a dropped job, and remove its metric: a new job may have its name."""
        care.close()
        with suppress(KeyError):
            self._metrics.collection_age.remove(job)

    def _new_maintenance(self, job: ActiveJob) -> JobMaintenance:
        return JobMaintenance(
            job.name,
            job.store,
            self._store,
            self._compactor,
            self._clock,
            self._metrics,
            self._in_thread,
            self._settings.compaction,
            self._settings.retention,
            self._ids,
        )

    async def _collect_regularly(self, job: ActiveJob) -> None:
        """Collect a job's garbage while this service is its coordinator, and once more after its last request."""
        is_last = False
        while not is_last:
            await asyncio.sleep(self._settings.interval_s)
            used_ms = job.used_ms
            # After a failure the next round retries; nothing waits for it, nor do deleted jobs wait for this one.
            try:
                if await self._in_thread(job.name, _is_taken_over, job):
                    logger.info("another service coordinates the job now", extra={"job": job.name})
                    break
                await self.collect(job, dry_run=False)
                self.maintenance_of(job).wake()
            except DstlError as error:
                logger.warning("garbage collection failed", extra={"job": job.name, "error": str(error)})
            except Exception:  # a bug here must not end the collections of the job
                logger.exception("garbage collection failed", extra={"job": job.name})
            await self._collect_deleted(job)
            # A request that came meanwhile leads to another round.
            is_last = job.used_ms == used_ms < self._clock.monotonic_ms() - IDLE_MS
            self._jobs.evict_idle()
        self._metrics.collection_age.remove(job.name)  # or it would be reported as overdue

    async def _collect_deleted(self, job: ActiveJob) -> None:
        """Collect deleted jobs in this one's threads; the next round retries failures."""
        try:
            for removal in await self._in_thread(job.name, self._deletions.collect_expired):
                logger.info("deleted job collected", extra={"job": removal.job, "objects": removal.objects})
        except DstlError as error:
            logger.warning("deleted jobs were not collected", extra={"job": job.name, "error": str(error)})
        except Exception:  # as above
            logger.exception("deleted jobs were not collected", extra={"job": job.name})


def _is_taken_over(job: ActiveJob) -> bool:
    """Return whether a newer epoch has its fence: before that, the older driver goes on. Mostly one request."""
    return job.store.has_newer_epoch(job.owned_epoch) and job.store.frontier()[1] > job.owned_epoch
