"""
Brings checkpoints to exist: chooses what their notes say, has their sets made durable, and writes their manifests.

Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from dstl_service.collection.maintenance import Maintenance
from dstl_service.collection.upkeep import Upkeep
from dstl_service.formats.checkpoint_record import CheckpointRecord, note_of
from dstl_service.formats.manifest import Manifest, ManifestKind, StateView, is_complete_due
from dstl_service.formats.under_way import NOTHING, UnderWay
from dstl_service.intake.active_job import ActiveJob, ActiveJobs
from dstl_service.intake.persister import Persister
from dstl_service.materialization.admission import Reported, check_form
from dstl_service.materialization.materializer import Materializer
from dstl_service.metrics.checkpoints import CheckpointMetrics
from dstl_service.process.job_threads import RunInThread
from dstl_service.restore.truncation import truncate
from dstl_service.wire import CheckpointRef, CompleteRequest, CompleteResponse
from storage.clock import Clock
from storage.errors import (
    ConflictError,
    CorruptDataError,
    FencedError,
    InvalidInputError,
    LostChangesError,
    NotFoundError,
)
from storage.model import Segment, SegmentHandle, Writer

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """
    A checkpoint that is on its way.

    Args:
        id: Its id.
        request: What was asked for.
        note: What it is going to be.
        segment: The note, encoded.
        under_way: What it is going to list.
    """

    id: int
    request: CompleteRequest
    note: CheckpointRecord
    segment: Segment
    under_way: UnderWay

    def is_for(self, checkpoint_id: int, request: CompleteRequest) -> bool:
        """Say whether it is what this request asks for."""
        return (self.id, self.request) == (checkpoint_id, request)


class Checkpointer:
    """
    Completes the checkpoints of jobs of which this service is the coordinator.

    Args:
        jobs: The jobs of this process.
        persister: Makes sets durable.
        materializer: Knows the snapshots that a checkpoint may take in.
        upkeep: Learns of new checkpoints, and has compactions for them.
        clock: Dates manifests.
        metrics: The service's.
        in_thread: Runs a blocking call of a job.
    """

    def __init__(
        self,
        jobs: ActiveJobs,
        persister: Persister,
        materializer: Materializer,
        upkeep: Upkeep,
        clock: Clock,
        metrics: CheckpointMetrics,
        in_thread: RunInThread,
    ) -> None:
        self._jobs = jobs
        self._persister = persister
        self._materializer = materializer
        self._upkeep = upkeep
        self._clock = clock
        self._metrics = metrics
        self._in_thread = in_thread
        self._pending: WeakKeyDictionary[ActiveJob, PendingCheckpoint] = WeakKeyDictionary()

    async def begin(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Start a checkpoint anew: sets of earlier tries at it are forgotten."""
        job = await self._owned(name, epoch)
        self._jobs.begin_look(job, checkpoint_id)
        await job.discard_attempt(checkpoint_id)

    async def abort(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Give a checkpoint up: its sets are forgotten; stored ones become orphans."""
        job = await self._owned(name, epoch)
        await job.discard_attempt(checkpoint_id)

    async def flush(self, name: str, checkpoint_id: int, request: CompleteRequest) -> None:
        """
        Start the upload of what a checkpoint consists of; `complete` follows with the same request.

        Raises:
            LostChangesError: A set is gone; the batch must be executed again.
        """
        job = await self._owned(name, request.epoch)
        self._check_request(job, checkpoint_id, request)
        noted = await self._noted(job, checkpoint_id, request)
        await self._persister.persist(job, request.refs, wait=False, note=noted.segment)

    async def complete(self, name: str, checkpoint_id: int, request: CompleteRequest) -> CompleteResponse:
        """
        Make a checkpoint exist: wait until its sets are durable, then write its manifest (I3).

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: The base is not the checkpoint before this one.
            LostChangesError: A set is gone; the batch must be executed again.
            UnavailableError: The store did not take it, or too late; nothing is lost, ask again.
        """
        job = await self._owned(name, request.epoch)
        await self._jobs.check_not_ended(job)
        completed = await self._complete(job, checkpoint_id, request)
        if request.epoch == job.owned_epoch:  # its batches may be so long that the collector had ended
            self._upkeep.start_collector(job)
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
            noted = await self._noted(job, checkpoint_id, request)
            durable = await self._persister.persist(job, request.refs, note=noted.segment)
            handles, of_note = durable[: len(request.refs)], durable[len(request.refs) :]
            _check_writers(job.name, handles, request, checkpoint_id)
            durable_ms = self._clock.monotonic_ms()
            async with job.writing:
                if job.turn != turn:
                    raise LostChangesError(
                        f"checkpoint {checkpoint_id} was begun anew or aborted meanwhile", job=job.name
                    )
                manifest, manifest_bytes = await self._in_thread(
                    job.name, self._write_manifest, job, noted, handles, of_note
                )
        except (LostChangesError, NotFoundError):
            # A complete checkpoint's sets are forgotten, and its base may be: a driver without an answer asks again.
            made = await self._in_thread(job.name, job.store.find, checkpoint_id, request.uid, request.base)
            if made is None:
                job.check_epoch(request.epoch)  # sets of an older epoch are forgotten, and collected, as well
                await self._in_thread(job.name, job.store.check_still_newest, request.epoch)
                raise
            return CompleteResponse(made.ref, 0.0, 0.0, 0, 0)
        self._upkeep.maintenance_of(job).checkpoint_completed(manifest)
        job.book.forget_up_to(checkpoint_id)
        self._pending.pop(job, None)
        job.wake()
        done_ms = self._clock.monotonic_ms()
        objects = {handle.object_key: handle.object_size_bytes for handle in durable}
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
        if checkpoint_id != (request.base.id + 1 if request.base is not None else 0):
            # Fences stand directly behind the newest checkpoint; a gap would lead around them (I4).
            before = f"checkpoint {request.base.id}" if request.base is not None else "nothing"
            raise ConflictError(f"checkpoint {checkpoint_id} cannot follow {before}")
        CheckpointRef.parse(f"0.0.{request.uid}")
        check_form(request.materializations)

    async def _noted(self, job: ActiveJob, checkpoint_id: int, request: CompleteRequest) -> PendingCheckpoint:
        """Return the note for this request; `complete` takes the one that `flush` has sent on its way."""
        pending = self._pending.get(job)
        if pending is None or not pending.is_for(checkpoint_id, request):
            reported = await self._materializer.choose(job.name, job.store, request.base, request.materializations)
            # What replaces the log is chosen here. However long the checkpoint takes, its base lists that as under way.
            maintenance = self._upkeep.maintenance_of(job)
            pending = await self._in_thread(
                job.name, self._make_note, job, maintenance, checkpoint_id, request, reported
            )
            self._pending[job] = pending
        return pending

    def _make_note(
        self,
        job: ActiveJob,
        maintenance: Maintenance,
        checkpoint_id: int,
        request: CompleteRequest,
        reported: Reported,
    ) -> PendingCheckpoint:
        base = request.base
        try:
            before = job.store.state(base) if base is not None else StateView((), [])
            listed = job.store.resolve(base).under_way if base is not None else NOTHING
        except (NotFoundError, CorruptDataError):
            _, epoch = job.store.frontier()
            if epoch > request.epoch:  # so much newer that even the base is subsumed, or part of its chain
                raise FencedError(
                    f"job {job.name!r} was taken over by epoch {epoch}; this query runs as epoch {request.epoch} and "
                    "must stop",
                    epoch=request.epoch,
                    newer_epoch=epoch,
                ) from None
            raise
        view, compactions = maintenance.replace(truncate(before, reported.taken), listed)
        snapshots = reported.under_way(job.store, base, request.operators, view.materializations) if base else ()
        is_complete = view is not before or is_complete_due(checkpoint_id)
        note = note_of(
            job.name,
            job.store.job_uid,
            job.store.max_parallelism,
            checkpoint_id,
            request,
            view if is_complete else None,
        )
        return PendingCheckpoint(checkpoint_id, request, note, note.to_segment(), UnderWay(snapshots, compactions))

    def _write_manifest(
        self, job: ActiveJob, noted: PendingCheckpoint, handles: list[SegmentHandle], of_note: Sequence[SegmentHandle]
    ) -> tuple[Manifest, int]:
        note = noted.note
        objects = {handle.object_key for handle in handles}
        manifest = Manifest(
            kind=ManifestKind.DELTA if note.start is None else ManifestKind.COMPLETE,
            job_uid=job.store.job_uid,
            id=note.checkpoint_id,
            generation=0,
            uid=note.uid,
            epoch=note.epoch,
            created_ms=self._clock.now_ms(),
            base=note.base,
            query_id=note.query_id,
            offsets=note.offsets,
            operators=note.operators,
            segments=tuple(handles),
            earlier=() if note.start is None else tuple(note.start.log),
            materializations=() if note.start is None else note.start.materializations,
            note=next((handle for handle in of_note if handle.object_key not in objects), None),
            under_way=noted.under_way,
            closed_ms=note.closed_ms,
        )
        return job.store.create(manifest)


def _check_writers(job: str, handles: Sequence[SegmentHandle], request: CompleteRequest, checkpoint_id: int) -> None:
    """
    Refuse a checkpoint that would name several writers for one partition (I2) or sets that are not its own.

    Where the batch was closed, another writer may have followed the first one. It knew which one that was, and how many
    sets that one had: its own are numbered behind them. So two attempts of one pass are never taken for both passes.
    """
    epoch, writers_max = request.epoch, 1 if request.closed_ms is None else 2
    writers: dict[tuple[str, int], dict[Writer, list[int]]] = {}
    if len({handle.entry.id for handle in handles}) != len(handles):
        raise InvalidInputError(f"checkpoint {checkpoint_id} names a change set twice")
    for handle in handles:
        set_id = handle.entry.id
        if (set_id.job, set_id.checkpoint_id, set_id.writer.epoch) != (job, checkpoint_id, epoch):
            raise InvalidInputError(
                f"change set {set_id} does not belong to job {job!r}, checkpoint {checkpoint_id}, epoch {epoch}"
            )
        of_partition = writers.setdefault((set_id.operator, set_id.partition), {})
        of_partition.setdefault(set_id.writer, []).append(set_id.sqn)
        if len(of_partition) > writers_max:
            raise InvalidInputError(
                f"checkpoint {checkpoint_id} names {len(of_partition)} writers for partition {set_id.partition} of "
                f"{set_id.operator!r}"
            )
    for (operator, partition), of_partition in writers.items():
        if len(of_partition) > 1 and not _follow_each_other(of_partition):
            raise InvalidInputError(
                f"checkpoint {checkpoint_id} names attempts {sorted(writer.attempt for writer in of_partition)} for "
                f"partition {partition} of {operator!r}, of which none goes on behind the other"
            )


def _follow_each_other(sqns: Mapping[Writer, Sequence[int]]) -> bool:
    """Say whether the sets of an epoch's writers, in the order of their attempts, are numbered through."""
    ordered = sorted(sqns, key=lambda writer: writer.attempt)
    numbers = [sqn for writer in ordered for sqn in sorted(sqns[writer])]
    return numbers == list(range(len(numbers)))
