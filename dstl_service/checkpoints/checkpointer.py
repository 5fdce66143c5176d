"""
Completes checkpoints: has their content decided and their sets made durable, then writes their manifests.

Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from dstl_service.checkpoints.builder import (
    Base,
    CheckpointBuilder,
    PlannedCheckpoint,
    check_follows,
    check_size,
    check_writers,
)
from dstl_service.checkpoints.requested_parallelism import RequestedParallelism
from dstl_service.collection.background_work import BackgroundWork
from dstl_service.collection.job_maintenance import JobMaintenance
from dstl_service.formats.manifest import Manifest
from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.notes import Persisted
from dstl_service.intake.persister import Persister
from dstl_service.materialization.admission import Reported, check_form
from dstl_service.materialization.materializer import Materializer
from dstl_service.metrics.checkpoints import CheckpointMetrics
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from dstl_service.registry.parallelism_requests import WantedParallelism
from dstl_service.wire import CheckpointRef, CompleteRequest, CompleteResponse
from storage.clock import Clock
from storage.errors import (
    CorruptDataError,
    FencedError,
    LostChangesError,
    NotFoundError,
)

logger = logging.getLogger("dstl_service")


class Checkpointer:
    """
    Completes the checkpoints of jobs of which this service is the coordinator.

    Args:
        jobs: The jobs of this process.
        persister: Makes sets durable.
        materializer: Knows the snapshots that a checkpoint may take.
        background_work: Is told of new checkpoints, and provides compactions for them.
        wanted: Knows the parallelism that was requested.
        clock: Dates manifests.
        metrics: The service's.
        in_thread: Runs a blocking call of a job.
    """

    def __init__(
        self,
        jobs: ActiveJobs,
        persister: Persister,
        materializer: Materializer,
        background_work: BackgroundWork,
        wanted: RequestedParallelism,
        clock: Clock,
        metrics: CheckpointMetrics,
        in_thread: RunInThread,
    ) -> None:
        self._jobs = jobs
        self._persister = persister
        self._materializer = materializer
        self._background_work = background_work
        self._wanted = wanted
        self._clock = clock
        self._metrics = metrics
        self._in_thread = in_thread
        self._pending: WeakKeyDictionary[ActiveJob, PlannedCheckpoint] = WeakKeyDictionary()

    async def begin(self, name: str, checkpoint_id: int, epoch: int) -> dict[str, WantedParallelism]:
        """Begin a checkpoint: sets of earlier tries at it are forgotten. Return the requested parallelism."""
        job = await self._owned(name, epoch)
        self._jobs.begin_look(job, checkpoint_id)
        await job.discard_attempt(checkpoint_id)
        return self._wanted.of(job, epoch)

    async def abort(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Abort a checkpoint: its sets are forgotten; stored ones become orphans."""
        job = await self._owned(name, epoch)
        await job.discard_attempt(checkpoint_id)

    async def flush(self, name: str, checkpoint_id: int, request: CompleteRequest) -> None:
        """
        Start the upload of a checkpoint's sets and its note; `complete` follows with the same request.

        Raises:
            LostChangesError: A set is gone; the batch must run again.
        """
        job = await self._owned(name, request.epoch)
        self._check_request(job, checkpoint_id, request)
        planned = await self._planned(job, checkpoint_id, request)
        await self._persister.persist(job, request.refs, wait=False, note=planned.note)

    async def complete(self, name: str, checkpoint_id: int, request: CompleteRequest) -> CompleteResponse:
        """
        Complete a checkpoint: wait until its sets are durable, then write its manifest (I3).

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: The base is not the checkpoint before this one.
            LostChangesError: A set is gone; the batch must run again.
            UnavailableError: The store failed or timed out; nothing is lost, retry.
        """
        job = await self._owned(name, request.epoch)
        await self._jobs.check_not_ended(job)
        completed = await self._complete(job, checkpoint_id, request)
        if request.epoch >= job.owned_epoch:
            # Another process may have begun the epoch, and after a long batch the collector may have ended.
            job.owned_epoch = request.epoch
            self._background_work.start_collector(job)
        return completed

    async def _owned(self, name: str, epoch: int) -> ActiveJob:
        """Return a job that is open here and owned by this epoch."""
        job = await self._jobs.opened(name)
        await self._jobs.owned(name, epoch)
        return job

    async def _complete(self, job: ActiveJob, checkpoint_id: int, request: CompleteRequest) -> CompleteResponse:
        self._check_request(job, checkpoint_id, request)
        started_ms = self._clock.monotonic_ms()
        turn = job.turn
        try:
            planned = await self._planned(job, checkpoint_id, request)
            durable = await self._persister.persist(job, request.refs, note=planned.note)
            check_writers(job.name, durable.handles, request, checkpoint_id)
            durable_ms = self._clock.monotonic_ms()
            async with job.writing:
                if job.turn != turn:
                    raise LostChangesError(
                        f"checkpoint {checkpoint_id} was begun again or aborted meanwhile", job=job.name
                    )
                manifest, manifest_bytes = await self._in_thread(job.name, self._write_manifest, job, planned, durable)
        except (LostChangesError, NotFoundError):
            # Sets of a complete checkpoint are forgotten, its base may be deleted: a driver without an answer retries.
            made = await self._in_thread(job.name, job.store.find, checkpoint_id, request.uid, request.base)
            if made is None:
                job.check_epoch(request.epoch)  # sets of an older epoch are forgotten and collected too
                await self._in_thread(job.name, job.store.check_still_newest, request.epoch)
                raise
            return CompleteResponse(made.ref, 0.0, 0.0, 0, 0)
        self._background_work.maintenance_of(job).checkpoint_completed(manifest)
        job.book.forget_up_to(checkpoint_id)
        self._pending.pop(job, None)
        job.wake()
        done_ms = self._clock.monotonic_ms()
        objects = {handle.object_key: handle.object_size_bytes for handle in durable.all_handles}
        self._metrics.checkpoints.labels(job.name).inc()
        self._metrics.checkpoint_seconds.observe((done_ms - started_ms) / 1000)
        logger.info(
            "checkpoint completed",
            extra={
                "job": job.name,
                "checkpoint_id": checkpoint_id,
                "epoch": request.epoch,
                "objects": len(objects) + 1,
            },
        )
        return CompleteResponse(
            ref=manifest.ref,
            persist_ms=durable_ms - started_ms,
            manifest_ms=done_ms - durable_ms,
            bytes_written=sum(objects.values()) + manifest_bytes,
            objects_written=len(objects) + 1,
        )

    def _check_request(self, job: ActiveJob, checkpoint_id: int, request: CompleteRequest) -> None:
        job.check_epoch(request.epoch)
        check_follows(checkpoint_id, request.base)
        check_size(request)
        CheckpointRef.parse(f"0.0.{request.uid}")

    async def _planned(self, job: ActiveJob, checkpoint_id: int, request: CompleteRequest) -> PlannedCheckpoint:
        """Return the plan for this request; `complete` reuses the one of `flush`."""
        pending = self._pending.get(job)
        if pending is None or not pending.is_for(checkpoint_id, request):
            if request.materializations:  # on the event loop, a request could keep all others waiting for seconds
                await self._in_thread(job.name, check_form, request.materializations)
            reported = await self._materializer.choose(job.name, job.store, request.base, request.materializations)
            # Replacements for the log are chosen here. However long the checkpoint takes, its base lists them.
            maintenance = self._background_work.maintenance_of(job)
            pending = await self._in_thread(job.name, self._plan, job, maintenance, checkpoint_id, request, reported)
            self._pending[job] = pending
        return pending

    def _plan(
        self,
        job: ActiveJob,
        maintenance: JobMaintenance,
        checkpoint_id: int,
        request: CompleteRequest,
        reported: Reported,
    ) -> PlannedCheckpoint:
        """Read the base and plan the checkpoint. Blocking; for threads."""
        try:
            base = Base() if request.base is None else _base_of(job.store, request.base)
        except (NotFoundError, CorruptDataError):
            _, epoch = job.store.frontier()
            if epoch > request.epoch:  # so much newer that the base or part of its chain is deleted
                raise FencedError.taken_over(job.name, request.epoch, epoch) from None
            raise
        now_ms = self._clock.now_ms()
        return _builder_of(job).plan(checkpoint_id, request, base, reported, maintenance.replace, now_ms)

    def _write_manifest(self, job: ActiveJob, planned: PlannedCheckpoint, durable: Persisted) -> tuple[Manifest, int]:
        made = _builder_of(job).manifest(planned, durable.handles, durable.note, self._clock.now_ms())
        return job.store.create_manifest(made)


def _builder_of(job: ActiveJob) -> CheckpointBuilder:
    return CheckpointBuilder(job.name, job.store.job_uid, job.store.max_parallelism, job.store.origin)


def _base_of(job_store: JobStore, ref: CheckpointRef) -> Base:
    return Base(ref, job_store.state(ref), job_store.resolve(ref).under_way)
