"""
The service itself: one object that the routes call; it joins the parts with each other, with storage and threads.

All state here is a cache of the store or a set that is not durable yet, so the process may be killed at any time.
Methods run on the event loop; blocking store calls go to threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from dstl_service.checkpoints.checkpointer import Checkpointer
from dstl_service.collection.garbage_collector import GarbageReport
from dstl_service.collection.tombstones import Deletions
from dstl_service.collection.upkeep import Upkeep
from dstl_service.compaction.compactor import Compactor
from dstl_service.formats.checkpoint_record import received_segment
from dstl_service.formats.manifest import Manifest
from dstl_service.intake.active_job import ActiveJobs
from dstl_service.intake.handle_check import HandleCheck
from dstl_service.intake.in_flight_limiter import InFlightLimiter, Place
from dstl_service.intake.intake import Intake
from dstl_service.intake.persister import Persister
from dstl_service.materialization.materializer import Materializer
from dstl_service.metrics.service import ServiceMetrics
from dstl_service.peers.calls import PeerCalls
from dstl_service.peers.client import PeerClient
from dstl_service.peers.registry import Announcement, PeerRegistry
from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.job_threads import NO_JOB, JobThreads
from dstl_service.restore.download_cache import DownloadCache
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restores import Restores
from dstl_service.settings import ServiceSettings
from dstl_service.uploads.uploader import ThreadPerCall, Uploader
from dstl_service.wire import (
    BatchFigures,
    ChangeSetRef,
    CheckpointInfo,
    CompleteRequest,
    CompleteResponse,
    JobInfo,
    OpenedJob,
    OpenJob,
)
from storage.clock import Clock, IdSource
from storage.errors import NotFoundError
from storage.model import ChangeSetId, Segment, SegmentHandle, validate_name
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")

_BACKGROUND_TIMEOUT_MS = 60_000


class ChangelogService:
    """Takes change sets in, makes them durable, completes checkpoints, and restores."""

    def __init__(
        self, settings: ServiceSettings, store: ObjectStore, clock: Clock, ids: IdSource, peers: PeerClient
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._ids = ids
        self._deletions = Deletions(store, clock, ids)
        self._upload_threads = ThreadPerCall("upload")
        self._io_threads = JobThreads(settings.io_threads, "io")
        self._in_thread = self._io_threads.run
        self._looks = FairSlots(max(1, settings.io_threads // 2))
        self._cache = SegmentCache(settings.cache.bytes_max)
        self._downloads = DownloadCache(
            store,
            settings.cache.folder,
            settings.cache.disk_bytes_max if settings.keeps_downloads else 0,
            settings.cache.idle_s,
            clock,
            ids,
            settings.trust,
        )
        self.service_id = ids.unique_id()
        self.metrics = ServiceMetrics(
            in_flight_bytes=lambda: room.used_bytes,
            queued_change_sets=lambda: sum(job.book.queued for job in self._jobs),
            attempts_running=lambda: uploader.attempts_running,
            cache_hits=lambda: self._cache.hits,
            cache_misses=lambda: self._cache.misses,
            cache_bytes=lambda: self._cache.bytes_kept,
            downloads=self._downloads.figures,
        )
        self._materializer = Materializer(
            settings.materialization,
            store,
            clock,
            ids,
            ThreadPerCall("materialize"),
            self.metrics.registry,
        )
        uploader = Uploader(
            store, self._upload_threads, settings.upload, ids, settings.host_id, slots=settings.upload.threads
        )
        background = replace(settings.upload, timeout_ms=max(settings.upload.timeout_ms, _BACKGROUND_TIMEOUT_MS))
        compactor = Compactor(
            store,
            self._cache,
            Uploader(store, self._upload_threads, background, ids, settings.host_id),
            self._in_thread,
        )
        room = InFlightLimiter(
            settings.batch.in_flight_bytes_max,
            lambda job: self._jobs.in_flight_bytes_of(job),  # noqa: PLW0108 - they are made further down
            lambda: self._intake.flush_all(),  # noqa: PLW0108 - it is made further down
            self.metrics.refused.inc,
        )
        self._jobs = ActiveJobs(store, clock, ids, settings.batch, room, self._in_thread)
        self._upkeep = Upkeep(
            settings.upkeep,
            self._jobs,
            store,
            compactor,
            self._deletions,
            clock,
            ids,
            self.metrics,
            self._in_thread,
        )
        self._announcement = Announcement(settings.advertised_url, store, partial(self._in_thread, NO_JOB), clock)
        self._intake = Intake(
            settings.intake,
            self._jobs,
            room,
            uploader,
            self._cache,
            clock,
            self.metrics,
            self.service_id,
            lambda: self._announcement.url,
        )
        self._persister = Persister(
            self._intake, self._peer_calls(peers), HandleCheck(store, self._look), self.service_id
        )
        self.restores = Restores(
            self._jobs,
            self._persister,
            self._materializer,
            self._downloads,
            self._cache,
            clock,
            self.metrics,
            self._in_thread,
        )
        self._checkpointer = Checkpointer(
            self._persister,
            self._materializer,
            self._upkeep,
            clock,
            self.metrics,
            self._in_thread,
        )

    @property
    def job_names(self) -> list[str]:
        """The jobs that this process has seen."""
        return sorted(job.name for job in self._jobs)

    @property
    def is_busy(self) -> bool:
        """Say whether something is done that no request waits for."""
        return self._materializer.is_busy or self._upkeep.is_busy

    async def check_storage(self, job: str = NO_JOB) -> None:
        """
        Write and delete a probe object, for a job or for the service itself.

        Raises:
            DstlError: The storage cannot be written; says what to do.
        """
        await self._in_thread(job, self._store.check_writable)

    async def job(self, name: str) -> JobInfo:
        """Return what is stored of a job; nobody is fenced."""
        job = await self._jobs.opened(name)
        latest, epoch = await self._in_thread(name, job.store.frontier)
        return JobInfo(
            job=name,
            job_uid=job.store.job_uid,
            epoch=epoch,
            max_parallelism=job.store.max_parallelism,
            latest=latest.info() if latest else None,
        )

    async def job_uid(self, name: str) -> str:
        """Return what tells a job from others that had or will have its name."""
        return (await self._jobs.opened(name)).store.job_uid

    async def open_job(self, name: str, request: OpenJob) -> OpenedJob:
        """Take the job over with a new epoch; every older driver of it is fenced from now on."""
        validate_name("job", name)
        await self._jobs.forget_ended(name)
        job = self._jobs.get(name)
        # One after the other: a request that was repeated must not get a higher epoch than the one that is answered.
        async with job.opening:
            await self.check_storage(name)
            await self._in_thread(name, self._deletions.check, name)
            await self._in_thread(name, job.store.open, request.max_parallelism)
            epoch, latest = await self._in_thread(name, job.store.claim, request.owner)
            job.learn_epoch(epoch)
            # Whoever deletes puts the tombstone and then claims an epoch, so one of the two sees the other.
            await self._in_thread(name, self._deletions.check, name)
            await self._in_thread(name, job.store.check_not_ended)  # its tombstone goes when all is gone
            await self._in_thread(
                name, job.store.check_still_newest, epoch
            )  # that took a while: `latest` may be old by now
            job.check_epoch(epoch)
            job.owned_epoch = epoch
        self._upkeep.start_collector(job)
        logger.info("job opened", extra={"job": name, "epoch": epoch, "checkpoint_id": latest.id if latest else None})
        return OpenedJob(
            job=name,
            job_uid=job.store.job_uid,
            epoch=epoch,
            max_parallelism=job.store.max_parallelism,
            service_id=self.service_id,
            latest=latest.info() if latest else None,
        )

    def start(self) -> None:
        """Begin what nobody has to wait for at the start; called on the event loop."""
        self._announcement.begin()

    @property
    def change_set_bytes_max(self) -> int:
        """The largest change set that can ever be taken in."""
        return self._intake.change_set_bytes_max

    async def admit(self, set_id: ChangeSetId, job_uid: str = "") -> None:
        """
        Learn of the job and the epoch of a change set, if they are new here, before its body is read.

        Raises:
            NotFoundError: The store has no such job or epoch.
            FencedError: A newer epoch is known here.
        """
        await self._jobs.owned(set_id.job, set_id.writer.epoch, job_uid)

    def room_for(self, set_id: ChangeSetId, size_bytes: int) -> AbstractAsyncContextManager[Place]:
        """Return the context in which a change set arrives and is appended; see `Intake.room_for`."""
        return self._intake.room_for(set_id, size_bytes)

    def append(self, segment: Segment, *, preemptive: bool) -> ChangeSetRef:
        """Take a change set in, within the context of `room_for`; see `Intake.append`."""
        return self._intake.append(segment, preemptive=preemptive)

    async def persist(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Segment | None = None
    ) -> list[SegmentHandle]:
        """Make change sets durable; return their handles in order, then that of the note; see `Persister.persist`."""
        epochs = [ref.epoch for ref in refs] + ([note.id.writer.epoch] if note is not None else [])
        if not epochs:
            return []
        job = await self._jobs.known(name, max(epochs))
        return await self._persister.persist(job, refs, wait=wait, note=note)

    async def read_note(self, name: str, text: str) -> Segment:
        """Return the segment of a note that was sent; one of megabytes takes as long to read as a hundred requests."""
        return await self._in_thread(name, received_segment, name, text)

    async def flush(self, name: str, checkpoint_id: int, request: CompleteRequest) -> None:
        """Start the upload of what a checkpoint consists of; see `Checkpointer.flush`."""
        job = await self._jobs.opened(name)
        await self._jobs.owned(name, request.epoch)
        await self._checkpointer.flush(job, checkpoint_id, request)

    async def complete(self, name: str, checkpoint_id: int, request: CompleteRequest) -> CompleteResponse:
        """Make a checkpoint exist (I3); see `Checkpointer.complete`."""
        job = await self._jobs.opened(name)
        await self._jobs.owned(name, request.epoch)
        await self._jobs.check_not_ended(job)
        completed = await self._checkpointer.complete(job, checkpoint_id, request)
        if request.epoch == job.owned_epoch:  # its batches may be so long that the collector had ended
            self._upkeep.start_collector(job)
        return completed

    async def begin(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Start a checkpoint anew: sets of earlier tries at it are forgotten."""
        job = await self._jobs.opened(name)
        await self._jobs.owned(name, epoch)
        self._jobs.begin_look(job, checkpoint_id)
        await job.discard_attempt(checkpoint_id)

    async def abort(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Give a checkpoint up: its sets are forgotten; stored ones become orphans."""
        job = await self._jobs.opened(name)
        await self._jobs.owned(name, epoch)
        await job.discard_attempt(checkpoint_id)

    async def count_batch(self, name: str, figures: BatchFigures) -> None:
        """Count a finished batch."""
        await self._jobs.opened(name)
        self.metrics.batches.observe(name, figures)

    async def checkpoints(self, name: str) -> list[CheckpointInfo]:
        """Return all completed checkpoints, oldest first."""
        job = await self._jobs.opened(name)
        return await self._in_thread(name, lambda: [manifest.info() for manifest in job.store.completed()])

    async def checkpoint(self, name: str, checkpoint_id: int) -> Manifest:
        """Return the newest generation of one checkpoint."""
        job = await self._jobs.opened(name)
        manifest = await self._in_thread(name, job.store.newest_of, checkpoint_id)
        if manifest is None:
            raise NotFoundError(f"job {name!r} has no checkpoint {checkpoint_id}", job=name)
        return manifest

    async def create_savepoint(self, name: str, savepoint: str, checkpoint_id: int | None) -> CheckpointInfo:
        """Keep a retained checkpoint, by default the newest, under a name, see `registry.savepoints`."""
        job = await self._jobs.opened(name)
        created = await self._in_thread(name, job.store.make_savepoint, savepoint, checkpoint_id)
        return created.info()

    async def savepoints(self, name: str) -> dict[str, CheckpointInfo]:
        """Return all savepoints of a job by name."""
        job = await self._jobs.opened(name)
        return await self._in_thread(name, lambda: {key: found.info() for key, found in job.store.savepoints.all()})

    async def delete_savepoint(self, name: str, savepoint: str) -> None:
        """Delete a savepoint; what only it named is collected later."""
        job = await self._jobs.opened(name)
        await self._in_thread(name, job.store.savepoints.delete, savepoint)

    async def collect_garbage(self, name: str, *, dry_run: bool) -> GarbageReport:
        """Delete the job's orphans, or only report them; see `dstl_service.collection.garbage_collector`."""
        return await self._upkeep.collect(await self._jobs.opened(name), dry_run=dry_run)

    def begin_stop(self) -> None:
        """Take no change set in from now on, and upload all that wait; requests that were begun are still answered."""
        self._intake.begin_stop()

    async def close(self) -> None:
        """Stop, wait for the uploads within the time that a stop may take, and give the threads back."""
        self._upkeep.close()
        await self._intake.stopped()
        await self._materializer.close()
        self._intake.close()
        self._upload_threads.shutdown(wait=False, cancel_futures=True)
        self._io_threads.close()
        self.restores.close()
        self._downloads.close()
        self._store.close()

    def _peer_calls(self, client: PeerClient) -> PeerCalls:
        settings = self._settings
        needs_tls = settings.tls.certificate_file is not None or settings.tls.ca_file is not None
        registry = PeerRegistry(settings.peers.allowed, self._store, self._look, self._clock, needs_tls=needs_tls)
        calls = settings.peers
        return PeerCalls(
            client,
            registry,
            ThreadPerCall("peer"),
            calls.calls_max,
            calls.calls_per_host_max,
            settings.peer_timeout_s,
        )

    async def _look(self, job: str, function: Callable[..., _T], *args: Any) -> _T:
        """Look something up in the store that a request claims, and leave most threads to others meanwhile."""
        async with self._looks.held(job):
            return await self._in_thread(job, function, *args)
