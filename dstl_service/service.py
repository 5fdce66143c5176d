"""
The service itself: one object that the routes call; it joins the pure parts with storage and threads.

All state here is a cache of the store or a set that is not durable yet, so the process may be killed at any time.
Methods run on the event loop; blocking store calls go to threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from dstl_service.change_sets import ChangeSetBook
from dstl_service.compactor import Compactor
from dstl_service.download_cache import DownloadCache
from dstl_service.garbage_collector import GarbageReport, collect_garbage
from dstl_service.job_store import JobStore
from dstl_service.maintenance import Maintenance
from dstl_service.manifest import Manifest, ManifestKind, StateView, encode_manifest, is_complete_due
from dstl_service.materializer import Materializer, Offer
from dstl_service.metrics import ServiceMetrics
from dstl_service.notes import Note, encode_note, note_of
from dstl_service.peers import PeerClient
from dstl_service.restore import RestorePlan, SnapshotStream, plan_restore, read_plan, read_snapshots
from dstl_service.room import Room
from dstl_service.segment_cache import SegmentCache
from dstl_service.settings import ServiceSettings
from dstl_service.shutdown import STORED_BY
from dstl_service.snapshot_uploader import TableId
from dstl_service.truncation import truncate
from dstl_service.uploads import ThreadPerCall, Upload, Uploader
from dstl_service.wire import (
    NOTE_CHARS_MAX,
    NOTE_OPERATOR,
    ChangeSetRef,
    CheckpointInfo,
    CheckpointRef,
    CompleteRequest,
    CompleteResponse,
    OpenedJob,
    OpenJob,
    validate_operator,
)
from storage.checksum import BytesLike, checksum64
from storage.clock import Clock, IdSource
from storage.errors import (
    ClosedError,
    ConflictError,
    CorruptDataError,
    DstlError,
    FencedError,
    InvalidInputError,
    LostChangesError,
    NotFoundError,
    UnavailableError,
)
from storage.model import (
    SEGMENT_BYTES_MAX,
    ChangeSetId,
    KeyGroupRange,
    MaterializationHandle,
    Segment,
    SegmentHandle,
    validate_name,
)
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

_T = TypeVar("_T")

_BACKGROUND_TIMEOUT_MS = 60_000


@dataclass(slots=True)
class _Job:
    """What one service holds of one job."""

    store: JobStore
    book: ChangeSetBook
    room: Room
    maintenance: Maintenance
    epoch: int = 0
    newest_id: int = -1
    turn: int = 0
    """Counts begins and aborts: what was asked for before one of them is not carried out after it."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    noted: tuple[int, CompleteRequest, Note, int] | None = None
    """The checkpoint that is on its way: its id, what was asked for, its note, and until when that holds."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: str | None = None
    timer: asyncio.TimerHandle | None = None
    collector: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Let those who wait for sets, or for room, look again; who comes later waits for the next change."""
        self.room.freed()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class ChangelogService:
    """Takes change sets in, makes them durable, completes checkpoints, and restores."""

    def __init__(
        self, settings: ServiceSettings, store: ObjectStore, clock: Clock, ids: IdSource, peers: PeerClient
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._ids = ids
        self._peers = peers
        self._jobs: dict[str, _Job] = {}
        self._upload_threads = ThreadPerCall("upload")
        self._io_threads = ThreadPoolExecutor(settings.io_threads, thread_name_prefix="io")
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._stop_by = 0.0
        self._cache = SegmentCache(settings.cache.bytes_max)
        self._downloads = DownloadCache(
            store,
            settings.cache.folder,
            settings.cache.disk_bytes_max if settings.keeps_downloads else 0,
            settings.cache.idle_s,
            clock,
            ids,
        )
        self.service_id = ids.unique_id()
        self.metrics = ServiceMetrics(
            in_flight_bytes=lambda: self._room.used_bytes,
            queued_change_sets=lambda: sum(job.book.queued for job in self._jobs.values()),
            attempts_running=lambda: self._uploader.attempts_running,
            cache_hits=lambda: self._cache.hits,
            cache_misses=lambda: self._cache.misses,
            cache_bytes=lambda: self._cache.bytes_kept,
            downloads=self._downloads,
        )
        self._room = Room(settings.batch.in_flight_bytes_max, self._held_bytes, self._hurry, self.metrics.refused.inc)
        self._materializer = Materializer(
            settings.materialization,
            store,
            clock,
            ids,
            ThreadPerCall("materialize"),
            settings.gc.age_min_s * 1000,
            self.metrics.registry,
        )
        self._uploader = Uploader(
            store, self._upload_threads, settings.upload, ids, settings.host_id, slots=settings.upload.threads
        )
        background = replace(settings.upload, timeout_ms=max(settings.upload.timeout_ms, _BACKGROUND_TIMEOUT_MS))
        self._compactor = Compactor(
            store,
            self._cache,
            Uploader(store, self._upload_threads, background, ids, settings.host_id),
            clock,
        )

    @property
    def job_names(self) -> list[str]:
        """The jobs that this process has seen."""
        return sorted(self._jobs)

    async def check_storage(self) -> None:
        """
        Write and delete a probe object.

        Raises:
            DstlError: The storage cannot be written; says what to do.
        """
        await self._in_thread(self._store.check_writable)

    async def open_job(self, name: str, request: OpenJob) -> OpenedJob:
        """Take the job over with a new epoch; every older driver of it is fenced from now on."""
        validate_name("job", name)
        allowed_s = self._settings.checkpoint_timeout_s
        if request.checkpoint_timeout_s is not None and request.checkpoint_timeout_s > allowed_s:
            raise InvalidInputError(
                f"this query may wait {request.checkpoint_timeout_s} s for a checkpoint, and the service deletes what "
                f"no checkpoint names as if none took longer than {allowed_s} s: set checkpoint_timeout_s of both alike"
            )
        job = self._job(name)
        # One after the other: a request that was repeated must not get a higher epoch than the one that is answered.
        async with job.opening:
            await self.check_storage()
            await self._in_thread(job.store.open, request.max_parallelism)
            epoch, latest = await self._in_thread(job.store.claim, request.owner)
            self._check_epoch(name, job, epoch)
        if job.collector is None and self._settings.gc.interval_s > 0:
            job.collector = asyncio.get_running_loop().create_task(self._collect_regularly(name))
        logger.info("job opened", extra={"job": name, "epoch": epoch, "checkpoint_id": latest.id if latest else None})
        return OpenedJob(
            job=name,
            job_uid=job.store.job_uid,
            epoch=epoch,
            max_parallelism=job.store.max_parallelism,
            service_id=self.service_id,
            latest=latest.info() if latest else None,
        )

    @property
    def change_set_bytes_max(self) -> int:
        """The largest change set that can ever be taken in."""
        return min(SEGMENT_BYTES_MAX, self._settings.batch.in_flight_bytes_max)

    def room_for(self, set_id: ChangeSetId, size_bytes: int) -> AbstractAsyncContextManager[None]:
        """
        Return the context in which a change set arrives and is appended; entering it waits for room (I9).

        Raises:
            InvalidInputError: It can never fit; the client must send smaller change sets.
            ClosedError: The service is being stopped.
            FencedError: A newer epoch is known here.
            OverloadedError: On entering: too much waits for its upload; send it again after a while.
        """
        self._check_running()
        if size_bytes > self.change_set_bytes_max:
            raise InvalidInputError(
                f"a change set has at most {self.change_set_bytes_max} bytes here, not {size_bytes}; send several "
                "smaller ones (preemptive_bytes of the client), or raise in_flight_bytes_max"
            )
        if self._writable_job(set_id).book.holds(set_id):
            return nullcontext()  # sent again after a lost response; its bytes are counted already
        return self._room.reserved(size_bytes)

    def append(self, segment: Segment, *, preemptive: bool) -> ChangeSetRef:
        """
        Take a change set in, within the context of `room_for`: *received*, not durable.

        Raises:
            CorruptDataError: The bytes are not those that were sent.
            FencedError: A newer epoch is known here.
            ClosedError: The service is being stopped.
        """
        self._check_running()
        set_id = segment.id
        if checksum64(segment.payload) != segment.checksum:
            raise CorruptDataError(f"change set {set_id} was damaged on its way to the service", job=set_id.job)
        job = self._writable_job(set_id)
        job.book.receive(segment, self._clock.monotonic_ms(), preemptive=preemptive)
        self._cache.leave_room(self._held_bytes())
        self._schedule(set_id.job, job)
        self.metrics.change_sets.labels(set_id.job).inc()
        self.metrics.change_set_bytes.labels(set_id.job).inc(len(segment.payload))
        return ChangeSetRef(
            operator=set_id.operator,
            checkpoint_id=set_id.checkpoint_id,
            epoch=set_id.writer.epoch,
            attempt=set_id.writer.attempt,
            partition=set_id.partition,
            sqn=set_id.sqn,
            size_bytes=len(segment.payload),
            service_id=self.service_id,
            service_url=self._settings.advertised_url,
            checksum=f"{segment.checksum:016x}",
        )

    async def persist(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool = True, note: Note | None = None
    ) -> list[SegmentHandle]:
        """
        Make change sets durable, those of other services too; return their handles in order, then that of the note.

        A note goes into the same object as the sets that are here, or, if none is and it is not too long to be sent, as
        those of another service.

        Raises:
            LostChangesError: A set is gone with the process that received it.
            UnavailableError: The store did not take them; nothing is lost, ask again.
        """
        here = [ref for ref in refs if ref.handle is None and ref.service_id == self.service_id]
        away = [ref for ref in refs if ref.handle is None and ref.service_id != self.service_id]
        found = {id(ref): _given_handle(name, ref) for ref in refs if ref.handle is not None}
        job = self._job(name)
        ids = [ref.change_set_id(name) for ref in here]
        if ids:
            job.book.request(ids, self._clock.monotonic_ms())
        if note is not None and (here or not away or len(encode_note(note)) > NOTE_CHARS_MAX):
            ids.append(job.book.take_note(note.to_segment()))
            job.book.request(ids[-1:], self._clock.monotonic_ms())
            note = None
        self._schedule(name, job)
        remote = self._persist_away(name, away, wait=wait, note=note)
        if not wait:
            await remote
            return []
        of_note: list[SegmentHandle] = []
        answers = await asyncio.gather(self._durable(name, job, ids), remote)
        for owned, handles in zip((here, away), answers, strict=True):
            found.update({id(ref): handle for ref, handle in zip(owned, handles, strict=False)})
            of_note += handles[len(owned) :]
        return [*(found[id(ref)] for ref in refs), *of_note]

    async def flush(self, name: str, checkpoint_id: int, request: CompleteRequest) -> None:
        """
        Start the upload of what a checkpoint consists of; `complete` follows with the same request.

        Raises:
            LostChangesError: A set is gone; the batch must be executed again.
        """
        job = await self._opened(name)
        self._check_request(name, job, checkpoint_id, request)
        note = await self._note(name, job, checkpoint_id, request)
        await self.persist(name, request.refs, wait=False, note=note)

    async def complete(self, name: str, checkpoint_id: int, request: CompleteRequest) -> CompleteResponse:
        """
        Make a checkpoint exist: wait until its sets are durable, then write its manifest (I3).

        Raises:
            FencedError: A newer epoch has begun.
            ConflictError: The base is not the checkpoint before this one.
            LostChangesError: A set is gone; the batch must be executed again.
        """
        job = await self._opened(name)
        self._check_request(name, job, checkpoint_id, request)
        started_ms = self._clock.monotonic_ms()
        turn = job.turn
        try:
            note = await self._note(name, job, checkpoint_id, request)
            durable = await self.persist(name, request.refs, note=note)
            handles, of_note = durable[: len(request.refs)], durable[len(request.refs) :]
            _check_one_writer(name, handles, request.epoch, checkpoint_id)
            durable_ms = self._clock.monotonic_ms()
            async with job.writing:
                if job.turn != turn:
                    raise LostChangesError(f"checkpoint {checkpoint_id} was begun anew or aborted meanwhile", job=name)
                manifest, manifest_bytes = await self._in_thread(self._write_manifest, job, note, handles, of_note)
        except (LostChangesError, NotFoundError):
            # A complete checkpoint's sets are forgotten, and its base may be: a driver without an answer asks again.
            made = await self._in_thread(job.store.find, checkpoint_id, request.uid)
            if made is None:
                self._check_epoch(name, job, request.epoch)  # sets of an older epoch are forgotten as well
                raise
            return CompleteResponse(made.ref, 0.0, 0.0, 0, 0)
        job.maintenance.checkpoint_completed(manifest)
        job.book.forget_up_to(checkpoint_id)
        job.noted = None
        job.wake()
        done_ms = self._clock.monotonic_ms()
        objects = {handle.object_key: handle.object_size_bytes for handle in durable}
        self.metrics.checkpoints.labels(name).inc()
        self.metrics.checkpoint_seconds.observe((done_ms - started_ms) / 1000)
        logger.info(
            "checkpoint completed",
            extra={"job": name, "checkpoint_id": checkpoint_id, "epoch": request.epoch, "objects": len(objects) + 1},
        )
        return CompleteResponse(
            ref=manifest.ref,
            persist_ms=durable_ms - started_ms,
            manifest_ms=done_ms - durable_ms,
            bytes_written=sum(objects.values()) + manifest_bytes,
            objects_written=len(objects) + 1,
        )

    async def begin(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Start a checkpoint anew: sets of earlier tries at it are forgotten."""
        job = await self._opened(name)
        self._check_epoch(name, job, epoch)
        await self._take_turn(job, checkpoint_id)

    async def abort(self, name: str, checkpoint_id: int, epoch: int) -> None:
        """Give a checkpoint up: its sets are forgotten; stored ones become orphans."""
        job = await self._opened(name)
        self._check_epoch(name, job, epoch)
        await self._take_turn(job, checkpoint_id)

    async def checkpoints(self, name: str) -> list[CheckpointInfo]:
        """Return all completed checkpoints, oldest first."""
        job = await self._opened(name)
        return await self._in_thread(lambda: [manifest.info() for manifest in job.store.completed()])

    async def checkpoint(self, name: str, checkpoint_id: int) -> Manifest:
        """Return the newest generation of one checkpoint."""
        job = await self._opened(name)

        manifest = await self._in_thread(job.store.newest_of, checkpoint_id)
        if manifest is None:
            raise NotFoundError(f"job {name!r} has no checkpoint {checkpoint_id}", job=name)
        return manifest

    async def create_savepoint(self, name: str, savepoint: str, checkpoint_id: int | None) -> CheckpointInfo:
        """Keep a retained checkpoint, by default the newest, under a name; see `dstl_service.savepoints`."""
        job = await self._opened(name)

        def create() -> Manifest:
            manifest = job.store.newest() if checkpoint_id is None else job.store.newest_of(checkpoint_id)
            if manifest is None:
                raise NotFoundError(f"job {name!r} has no checkpoint that a savepoint could keep", job=name)
            return job.store.make_savepoint(savepoint, manifest)

        created = await self._in_thread(create)
        return created.info()

    async def savepoints(self, name: str) -> dict[str, CheckpointInfo]:
        """Return all savepoints of a job by name."""
        job = await self._opened(name)
        return await self._in_thread(lambda: {key: found.info() for key, found in job.store.savepoints.all()})

    async def delete_savepoint(self, name: str, savepoint: str) -> None:
        """Delete a savepoint; what only it named is collected later."""
        job = await self._opened(name)
        await self._in_thread(job.store.savepoints.delete, savepoint)

    async def plan_restore(
        self, name: str, operator: str, key_groups: KeyGroupRange, have: CheckpointRef | None, want: CheckpointRef
    ) -> tuple[RestorePlan, Offer]:
        """Decide what leads a table from `have` to `want`, and what else its task is told."""
        job = await self._opened(name)
        plan: RestorePlan = await self._in_thread(plan_restore, job.store, operator, key_groups, have, want)
        self.metrics.restored_bytes.labels(name).inc(plan.size_bytes)
        return plan, await self._materializer.offer(TableId(name, operator, key_groups), job.store, plan, want)

    async def take_snapshot(
        self, name: str, operator: str, key_groups: KeyGroupRange, version: CheckpointRef, path: str
    ) -> None:
        """Store a table's snapshot in the background; see `dstl_service.materializer`."""
        validate_name("operator", operator)
        job = await self._opened(name)
        await self._materializer.take(TableId(name, operator, key_groups), job.store, version, path)

    async def collect_garbage(self, name: str, *, dry_run: bool) -> GarbageReport:
        """Delete the job's orphans, or only report them; see `dstl_service.garbage_collector`."""
        job = await self._opened(name)
        report = await self._in_thread(
            partial(
                collect_garbage,
                self._store,
                job.store,
                name,
                self._clock,
                age_min_ms=self._settings.gc.age_min_s * 1000,
                checkpoints_max=self._settings.retention.checkpoints_max,
                dry_run=dry_run,
            )
        )
        self.metrics.orphans.labels(name).set(len(report.orphans) if dry_run else 0)
        if not dry_run:
            self.metrics.orphans_deleted.labels(name).inc(len(report.orphans))
        return report

    def read_plan(self, plan: RestorePlan) -> Iterator[tuple[SegmentHandle, BytesLike]]:
        """Yield a plan's payloads; blocking, for threads."""
        started_ms = self._clock.monotonic_ms()
        yield from read_plan(plan, self._downloads, self._cache)
        # The client takes a payload when it has applied the one before, or nearly so.
        self._materializer.replayed(plan.log_bytes, self._clock.monotonic_ms() - started_ms)

    def read_snapshots(self, plan: RestorePlan) -> SnapshotStream:
        """Yield the files of a plan's materializations; blocking, for threads."""
        return read_snapshots(plan, self._downloads)

    def begin_stop(self) -> None:
        """Take no change set in from now on, and upload all that wait; requests that were begun are still answered."""
        if self._stopping is None:
            loop = asyncio.get_running_loop()
            self._stop_by = loop.time() + self._settings.shutdown_timeout_s * STORED_BY
            self._stopping = loop.create_task(self._upload_rest())

    async def close(self) -> None:
        """Stop, wait for the uploads within the time that a stop may take, and give the threads back."""
        for job in self._jobs.values():
            job.maintenance.close()
            if job.collector is not None:
                job.collector.cancel()
        self.begin_stop()
        assert self._stopping is not None
        await asyncio.wait([self._stopping], timeout=max(0.0, self._stop_by - asyncio.get_running_loop().time()))
        self._stopping.cancel()
        await self._materializer.close()
        for name, job in self._jobs.items():
            lost = sum(set_id.operator != NOTE_OPERATOR for set_id in job.book.unstored)
            if lost:
                logger.warning(
                    "change sets were given up at the stop; batches that need them are executed again",
                    extra={"job": name, "change_sets": lost},
                )
        for late in self._late:
            late.cancel()
        self._upload_threads.shutdown(wait=False, cancel_futures=True)
        self._io_threads.shutdown(wait=False, cancel_futures=True)
        self._downloads.close()
        self._store.close()

    async def _upload_rest(self) -> None:
        """Upload until nothing is left to upload; what fails is sent again."""
        while any(job.book.unstored for job in self._jobs.values()):
            self._hurry()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if any(job.book.unstored for job in self._jobs.values()):
                await asyncio.sleep(self._settings.upload.delay_after_error_ms / 1000)

    def _held_bytes(self) -> int:
        return sum(job.book.in_flight_bytes for job in self._jobs.values())

    def _check_running(self) -> None:
        if self._stopping is not None:
            raise ClosedError("this service is being stopped and takes nothing more in; send the change set again")

    def _hurry(self) -> None:
        """Upload all that waits, of all jobs: somebody needs its room."""
        for name, job in self._jobs.items():
            job.book.release_all(self._clock.monotonic_ms())
            self._schedule(name, job)

    def _writable_job(self, set_id: ChangeSetId) -> _Job:
        """Return the job of a set that may be taken in; forget what its checkpoint makes obsolete."""
        validate_name("job", set_id.job)
        validate_operator(set_id.operator)
        job = self._job(set_id.job)
        self._check_epoch(set_id.job, job, set_id.writer.epoch)
        if set_id.checkpoint_id > job.newest_id:
            # A checkpoint begins when the one before exists. Only the coordinator is told; other hosts see it here.
            job.newest_id = set_id.checkpoint_id
            job.book.forget_up_to(set_id.checkpoint_id - 1)
            job.wake()
        return job

    def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            validate_name("job", name)
            store = JobStore(self._store, name, self._clock, self._ids)
            maintenance = Maintenance(
                name,
                store,
                self._store,
                self._compactor,
                self._clock,
                self.metrics,
                self._in_thread,
                self._settings.compaction,
                self._settings.retention,
                1000 * (self._settings.gc.age_min_s - self._settings.checkpoint_timeout_s),
            )
            job = self._jobs[name] = _Job(store, ChangeSetBook(self._settings.batch), self._room, maintenance)
        return job

    async def _opened(self, name: str) -> _Job:
        """Return the job, reading ``job.json`` if this process has not seen it yet."""
        job = self._job(name)
        if not job.store.job_uid:
            if not await self._in_thread(job.store.exists):
                raise NotFoundError(f"there is no job {name!r} in {self._store.url}", job=name)
            await self._in_thread(job.store.open, None)
        return job

    def _check_epoch(self, name: str, job: _Job, epoch: int) -> None:
        if epoch < job.epoch:
            raise FencedError(
                f"job {name!r} was taken over by epoch {job.epoch}; this query runs as epoch {epoch} and must stop",
                epoch=epoch,
                newer_epoch=job.epoch,
            )
        if epoch > job.epoch:
            logger.info("newer epoch", extra={"job": name, "epoch": epoch, "older_epoch": job.epoch})
            job.epoch, job.newest_id = epoch, -1  # a new owner may go on from an earlier checkpoint
            job.book.forget_epochs_before(epoch)
            job.wake()

    async def _take_turn(self, job: _Job, checkpoint_id: int) -> None:
        """Forget what was sent for a checkpoint; no earlier try at it can come to exist any more."""
        job.turn += 1
        async with job.writing:  # a manifest that is being written has come to exist, or has not, when this returns
            job.book.forget_up_to(checkpoint_id)
            job.wake()

    def _check_request(self, name: str, job: _Job, checkpoint_id: int, request: CompleteRequest) -> None:
        self._check_epoch(name, job, request.epoch)
        if checkpoint_id != (request.base.id + 1 if request.base is not None else 0):
            # Fences stand directly behind the newest checkpoint; a gap would lead around them (I4).
            before = f"checkpoint {request.base.id}" if request.base is not None else "nothing"
            raise ConflictError(f"checkpoint {checkpoint_id} cannot follow {before}")
        CheckpointRef.parse(f"0.0.{request.uid}")

    async def _note(self, name: str, job: _Job, checkpoint_id: int, request: CompleteRequest) -> Note:
        """Return the note for this request; `complete` takes the one that `flush` has sent on its way."""
        if job.noted is None or job.noted[:2] != (checkpoint_id, request) or self._clock.monotonic_ms() > job.noted[3]:
            chosen = await self._materializer.choose(name, job.store, request.base, request.materializations)
            note = await self._in_thread(self._make_note, name, job, checkpoint_id, request, chosen)
            # What replaces the log is chosen here, and must not be collected before the manifest names it.
            stale_ms = self._clock.monotonic_ms() + self._settings.checkpoint_timeout_s * 1000
            job.noted = checkpoint_id, request, note, stale_ms
        return job.noted[2]

    def _make_note(
        self,
        name: str,
        job: _Job,
        checkpoint_id: int,
        request: CompleteRequest,
        materialized: Sequence[MaterializationHandle],
    ) -> Note:
        try:
            before = job.store.state(request.base) if request.base is not None else StateView((), [])
        except (NotFoundError, CorruptDataError):
            _, epoch = job.store.frontier()
            if epoch > request.epoch:  # so much newer that even the base is subsumed, or part of its chain
                raise FencedError(
                    f"job {name!r} was taken over by epoch {epoch}; this query runs as epoch {request.epoch} and must "
                    "stop",
                    epoch=request.epoch,
                    newer_epoch=epoch,
                ) from None
            raise
        view = job.maintenance.replace(truncate(before, materialized))
        is_complete = view is not before or is_complete_due(checkpoint_id)
        return note_of(
            name, job.store.job_uid, job.store.max_parallelism, checkpoint_id, request, view if is_complete else None
        )

    def _schedule(self, name: str, job: _Job) -> None:
        """Make sure that a batch that is due gets taken; called whenever the book may have changed."""
        due_ms = job.book.due_ms
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if due_ms is None:
            return
        delay_s = max(0, due_ms - self._clock.monotonic_ms()) / 1000
        if delay_s > 0:
            job.timer = asyncio.get_running_loop().call_later(delay_s, self._schedule, name, job)
            return
        while batch := job.book.take_batch(self._clock.monotonic_ms()):
            self._start(self._upload(name, job, batch), self._tasks)

    async def _upload(self, name: str, job: _Job, batch: list[Segment]) -> None:
        self.metrics.uploads.labels(name).inc()
        self.metrics.batch_sets.observe(sum(segment.id.operator != NOTE_OPERATOR for segment in batch))
        started_ms = self._clock.monotonic_ms()
        upload: Upload | None = None
        try:
            upload = self._uploader.begin(name, batch)
            handles = await upload.stored()
        except Exception as error:  # a programming error must reach the waiters too, or they would wait for ever
            self.metrics.upload_failures.labels(name).inc()
            job.last_error = str(error)  # not the error itself: its traceback would keep the bytes in memory
            logger.warning(
                "upload failed",
                extra={**_fields_of(batch), "error": job.last_error},
                exc_info=None if isinstance(error, DstlError) else error,
            )
            job.book.failed(batch)
        else:
            self._uploaded(job, batch, handles)
            self.metrics.upload_seconds.observe((self._clock.monotonic_ms() - started_ms) / 1000)
            self.metrics.upload_bytes.observe(handles[0].object_size_bytes)
            self.metrics.upload_attempts.observe(upload.attempts)
            self.metrics.winning_attempt.observe(upload.winner)
            level = logging.INFO if upload.attempts > 1 else logging.DEBUG
            if logger.isEnabledFor(level):
                facts = {"object": handles[0].object_key, "upload_attempts": upload.attempts}
                logger.log(level, "change sets uploaded", extra={**_fields_of(batch), **facts})
        job.wake()
        self._start(self._release(name, job, batch, upload), self._late)

    async def _release(self, name: str, job: _Job, batch: list[Segment], upload: Upload | None) -> None:
        """Wait for the attempts of an upload that still run; one of an upload that was given up may yet succeed."""
        if upload is not None:
            if await upload.ended():
                self._uploaded(job, batch, upload.handles)
                job.wake()
            self.metrics.loser_attempts.labels(name).inc(upload.attempts - (upload.winner > 0))
        job.book.released(batch)
        self._room.freed()

    def _uploaded(self, job: _Job, batch: list[Segment], handles: list[SegmentHandle]) -> None:
        for handle, segment in zip(handles, batch, strict=True):
            if segment.id.operator != NOTE_OPERATOR:  # no table asks for notes
                self._cache.put(handle, segment.payload)
        job.book.uploaded(handles)
        self._cache.leave_room(self._held_bytes())

    async def _durable(self, name: str, job: _Job, ids: Sequence[Any]) -> list[SegmentHandle]:
        waiting = deque(ids)
        while True:
            changed = job.changed
            # Each upload wakes all who wait; none of them looks again at what it has seen to be durable.
            while waiting and job.book.is_durable(waiting[0]):
                waiting.popleft()
            if not waiting and (handles := job.book.handles(ids)) is not None:
                return handles
            if not job.book.is_uploading(waiting):
                raise UnavailableError(f"the log of job {name!r} could not be stored: {job.last_error}", job=name)
            await changed.wait()

    async def _persist_away(
        self, name: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: Note | None
    ) -> list[SegmentHandle]:
        """Ask the services of other hosts, each once, for the sets that they hold; the first one stores the note."""
        hosts: dict[str, list[ChangeSetRef]] = {}
        for ref in refs:
            if ref.service_url is None:
                raise LostChangesError(
                    f"a change set of checkpoint {ref.checkpoint_id} was received by a service process that is gone; "
                    "the batch must be executed again",
                    job=name,
                )
            hosts.setdefault(ref.service_url, []).append(ref)
        found: dict[int, SegmentHandle] = {}
        notes = [encode_note(note).decode() if note and not number else None for number in range(len(hosts))]
        answers = await asyncio.gather(
            *(
                # Without the address whoever is asked asks nobody else: a process that took the place of the one that
                # received a set would else ask itself, for ever.
                self._in_thread(
                    partial(
                        self._peers.persist,
                        url,
                        name,
                        [replace(ref, service_url=None) for ref in owned],
                        wait=wait,
                        note=text,
                    )
                )
                for (url, owned), text in zip(hosts.items(), notes, strict=True)
            )
        )
        if not wait:
            return []
        for owned, handles in zip(hosts.values(), answers, strict=True):
            found.update({id(ref): handle for ref, handle in zip(owned, handles, strict=False)})
        of_note = [
            handle for owned, handles in zip(hosts.values(), answers, strict=True) for handle in handles[len(owned) :]
        ]
        return [*(found[id(ref)] for ref in refs), *of_note]

    def _write_manifest(
        self, job: _Job, note: Note, handles: list[SegmentHandle], of_note: Sequence[SegmentHandle]
    ) -> tuple[Manifest, int]:
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
        )
        created = job.store.create(manifest)
        return created, len(encode_manifest(created))

    async def _collect_regularly(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._settings.gc.interval_s)
            try:
                await self.collect_garbage(name, dry_run=False)
                self._job(name).maintenance.wake()
            except DstlError as error:  # the next round tries again; nothing waits for it
                logger.warning("garbage collection failed", extra={"job": name, "error": str(error)})

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _in_thread(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._io_threads, function, *args)


def _given_handle(job: str, ref: ChangeSetRef) -> SegmentHandle:
    """
    Return the handle that somebody else got for a set.

    Raises:
        InvalidInputError: It points at another set, or at what is no segment object of the job.
    """
    assert ref.handle is not None
    handle = SegmentHandle.from_dict(ref.handle)
    if handle.entry.id != ref.change_set_id(job) or not handle.object_key.startswith(f"{job}/segments/"):
        raise InvalidInputError(f"the handle in {handle.object_key} is not that of change set {ref.change_set_id(job)}")
    return handle


def _fields_of(batch: Sequence[Segment]) -> dict[str, Any]:
    """Return what a log line says of change sets: of their newest checkpoint, and of the attempts that sent them."""
    ids = [segment.id for segment in batch]
    sent = [set_id for set_id in ids if set_id.operator != NOTE_OPERATOR]  # a checkpoint's note is nobody's change set
    return {
        "job": ids[0].job,
        "checkpoint_id": max(set_id.checkpoint_id for set_id in ids),
        "epoch": max(set_id.writer.epoch for set_id in ids),
        "attempts": sorted({set_id.writer.attempt for set_id in sent}),
        "change_sets": len(sent),
    }


def _check_one_writer(job: str, handles: Sequence[SegmentHandle], epoch: int, checkpoint_id: int) -> None:
    """Refuse a checkpoint that would name two writers for one partition (I2) or sets that are not its own."""
    writers: dict[tuple[str, int], Any] = {}
    if len({handle.entry.id for handle in handles}) != len(handles):
        raise InvalidInputError(f"checkpoint {checkpoint_id} names a change set twice")
    for handle in handles:
        set_id = handle.entry.id
        if (set_id.job, set_id.checkpoint_id, set_id.writer.epoch) != (job, checkpoint_id, epoch):
            raise InvalidInputError(
                f"change set {set_id} does not belong to job {job!r}, checkpoint {checkpoint_id}, epoch {epoch}"
            )
        if writers.setdefault((set_id.operator, set_id.partition), set_id.writer) != set_id.writer:
            raise InvalidInputError(
                f"checkpoint {checkpoint_id} names two writers for partition {set_id.partition} of {set_id.operator!r}"
            )
