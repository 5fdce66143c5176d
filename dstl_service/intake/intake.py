"""
Takes change sets in and makes them durable: room, the job's tracker, batches, uploads.

Owned by the event loop; upload attempts run in the uploader's threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.intake.in_flight_limiter import FIRST_BYTES_MAX, InFlightLimiter, Place
from dstl_service.intake.notes import NOTES_MAX, Batch, check_waiting, unstored_sets
from dstl_service.metrics.intake import IntakeMetrics
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.uploads.uploader import Upload, Uploader
from dstl_service.wire import ChangeSetRef
from storage.checksum import checksum64
from storage.clock import Clock
from storage.errors import (
    ClosedError,
    CorruptDataError,
    DstlError,
    InvalidInputError,
    UnavailableError,
)
from storage.model import ChangeSetId, Segment, SegmentHandle
from storage.validation import SEGMENT_BYTES_MAX

logger = logging.getLogger("dstl_service")


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """
    Bounds of the intake.

    Args:
        in_flight_bytes_max: Bytes received and not yet durable, over all jobs.
        stop_timeout_s: Time for uploads after the service was told to stop.
        delay_after_error_ms: During a stop, pause before failed uploads are repeated.
    """

    in_flight_bytes_max: int
    stop_timeout_s: float
    delay_after_error_ms: int


class Intake:
    """
    Takes change sets in and uploads them.

    Args:
        settings: Its bounds.
        jobs: The jobs of this process.
        room: Bounds the bytes in flight; calls `flush_all` when a request waits for room.
        uploader: Stores batches.
        cache: Keeps uploaded sets in the memory that sets in flight leave.
        clock: Tells when a batch is due.
        metrics: Metrics of the intake.
        service_id: Goes into references, which so name this process.
        service_url: Returns the URL for other hosts; None until they accept it.
    """

    def __init__(
        self,
        settings: IntakeSettings,
        jobs: ActiveJobs,
        room: InFlightLimiter,
        uploader: Uploader,
        cache: SegmentCache,
        clock: Clock,
        metrics: IntakeMetrics,
        service_id: str,
        service_url: Callable[[], str | None],
    ) -> None:
        self._settings = settings
        self._jobs = jobs
        self._room = room
        self._uploader = uploader
        self._cache = cache
        self._clock = clock
        self._metrics = metrics
        self._service_id = service_id
        self._service_url = service_url
        self._arriving_again: set[ChangeSetId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._stop_by = 0.0

    @property
    def change_set_bytes_max(self) -> int:
        """Size of the largest change set that can be taken in."""
        return min(SEGMENT_BYTES_MAX, self._settings.in_flight_bytes_max)

    def room_for(self, set_id: ChangeSetId, size_bytes: int) -> AbstractAsyncContextManager[Place]:
        """
        Return the context in which a change set arrives and is appended; entering it waits for room (I9).

        Raises:
            InvalidInputError: The set can never fit; the client must send smaller ones.
            ClosedError: The service is being stopped.
            FencedError: A newer epoch is known here.
            OverloadedError: The job holds too many sets, or, on entering: no room became free in time; send the set
                again later.
        """
        self._check_running()
        if size_bytes > self.change_set_bytes_max:
            raise InvalidInputError(
                f"a change set may have at most {self.change_set_bytes_max} bytes here, this one has {size_bytes}; "
                "send smaller ones (preemptive_bytes of the client), or raise batch.in_flight_bytes_max"
            )
        book = self._jobs.admit(set_id).book
        held_bytes = book.size_of(set_id)
        if held_bytes == size_bytes <= FIRST_BYTES_MAX:
            return self._received_again(set_id, size_bytes)
        if held_bytes is None:
            book.in_memory.check_room(set_id.job, 1 + NOTES_MAX)
        return self._room.reserved(set_id.job, size_bytes)

    @asynccontextmanager
    async def _received_again(self, set_id: ChangeSetId, size_bytes: int) -> AsyncIterator[Place]:
        """Let one request at a time send a held set again, after a lost response: its bytes already count."""
        if set_id in self._arriving_again:
            async with self._room.reserved(set_id.job, size_bytes) as place:
                yield place
            return
        self._arriving_again.add(set_id)
        try:
            yield Place(None, set_id.job, size_bytes)
        finally:
            self._arriving_again.discard(set_id)

    def append(self, segment: Segment, *, preemptive: bool) -> ChangeSetRef:
        """
        Take in a change set within the context of `room_for`: *received*, not durable.

        Raises:
            CorruptDataError: The payload does not match its checksum.
            ConflictError: The set was received before with other content.
            FencedError: A newer epoch is known here.
            ClosedError: The service is being stopped.
        """
        self._check_running()
        set_id = segment.id
        if checksum64(segment.payload) != segment.checksum:
            raise CorruptDataError(
                f"change set {set_id} was damaged on its way to the service: its checksum differs", job=set_id.job
            )
        job = self._jobs.admit(set_id)
        job.book.receive(segment, self._clock.monotonic_ms(), preemptive=preemptive)
        self._cache.leave_room(self._jobs.in_flight_bytes)
        self._schedule(job)
        self._metrics.change_sets.labels(set_id.job).inc()
        self._metrics.change_set_bytes.labels(set_id.job).inc(len(segment.payload))
        return ChangeSetRef(
            operator=set_id.operator,
            checkpoint_id=set_id.checkpoint_id,
            epoch=set_id.writer.epoch,
            attempt=set_id.writer.attempt,
            partition=set_id.partition,
            sqn=set_id.sqn,
            size_bytes=len(segment.payload),
            service_id=self._service_id,
            service_url=self._service_url(),
            checksum=f"{segment.checksum:016x}",
        )

    def request(self, job: ActiveJob, ids: Sequence[ChangeSetId], note: Segment | None) -> list[ChangeSetId]:
        """
        Request the upload of these sets, and of a note with them; return their ids, the note's last.

        Raises:
            LostChangesError: A set is not held.
            OverloadedError: Too many notes wait to be stored.
        """
        check_waiting(job.book, note)
        now_ms = self._clock.monotonic_ms()
        job.book.request(ids, now_ms)
        noted = [] if note is None else [job.book.take_note(note)]
        job.book.request(noted, now_ms)
        self._schedule(job)
        return [*ids, *noted]

    async def durable(self, job: ActiveJob, ids: Sequence[ChangeSetId]) -> list[SegmentHandle]:
        """
        Wait until these sets are durable; return their handles.

        Raises:
            LostChangesError: A set was forgotten meanwhile.
            UnavailableError: The upload failed; nothing is lost, ask again.
        """
        waiting = deque(ids)
        while True:
            changed = job.changed
            # Each upload wakes all waiters; none checks a set again that it has seen durable.
            while waiting and job.book.is_durable(waiting[0]):
                waiting.popleft()
            if not waiting and (handles := job.book.handles(ids)) is not None:
                return handles
            if not job.book.is_uploading(waiting):
                raise UnavailableError(
                    f"the log of job {job.name!r} could not be stored: {job.last_error}", job=job.name
                )
            await changed.wait()

    def flush_all(self) -> None:
        """Upload all waiting sets of all jobs to free room."""
        for job in self._jobs:
            job.book.request_all(self._clock.monotonic_ms())
            self._schedule(job)

    def begin_stop(self) -> None:
        """Refuse new change sets from now on, and upload all held ones; running requests are still answered."""
        if self._stopping is None:
            loop = asyncio.get_running_loop()
            self._stop_by = loop.time() + self._settings.stop_timeout_s
            self._stopping = loop.create_task(self._upload_rest())

    async def stopped(self) -> None:
        """Stop, and wait for uploads until `stop_timeout_s` after the stop began."""
        self.begin_stop()
        assert self._stopping is not None
        await asyncio.wait([self._stopping], timeout=max(0.0, self._stop_by - asyncio.get_running_loop().time()))
        self._stopping.cancel()

    def close(self) -> None:
        """Give up all change sets that are not durable, and log their number."""
        for job in self._jobs:
            if lost := unstored_sets(job.book):
                logger.warning(
                    "change sets were given up at the stop; batches that need them are executed again",
                    extra={"job": job.name, "change_sets": lost},
                )
        for late in self._late:
            late.cancel()

    async def _upload_rest(self) -> None:
        """Upload until all sets are durable; failed uploads are repeated."""
        while any(job.book.unstored for job in self._jobs):
            self.flush_all()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if any(job.book.unstored for job in self._jobs):
                await asyncio.sleep(self._settings.delay_after_error_ms / 1000)

    def _check_running(self) -> None:
        if self._stopping is not None:
            raise ClosedError("this service is stopping and takes no more change sets; send the change set again")

    def _schedule(self, job: ActiveJob) -> None:
        """Start the uploads that are due, or a timer for the next one; called after each change of the tracker."""
        due_ms = job.book.due_ms
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        if due_ms is None:
            return
        delay_s = max(0, due_ms - self._clock.monotonic_ms()) / 1000
        if delay_s > 0:
            job.timer = asyncio.get_running_loop().call_later(delay_s, self._schedule, job)
            return
        while batch := job.book.take_batch(self._clock.monotonic_ms()):
            self._start(self._upload(job, Batch.of(batch)), self._tasks)

    async def _upload(self, job: ActiveJob, batch: Batch) -> None:
        self._metrics.uploads.labels(job.name).inc()
        self._metrics.batch_sets.observe(len(batch.sent))
        started_ms = self._clock.monotonic_ms()
        upload: Upload | None = None
        try:
            upload = self._uploader.begin(job.name, batch.segments)
            handles = await upload.stored()
        except Exception as error:  # a bug must reach the waiters too, or they would wait for ever
            self._metrics.upload_failures.labels(job.name).inc()
            job.last_error = str(error)  # not the error itself: its traceback would keep the payloads in memory
            logger.warning(
                "upload failed",
                extra={**batch.fields, "error": job.last_error},
                exc_info=None if isinstance(error, DstlError) else error,
            )
            job.book.failed(batch.segments)
        else:
            self._uploaded(job, batch, handles)
            seconds = (self._clock.monotonic_ms() - started_ms) / 1000
            numbers = {"attempts": upload.attempts, "hedges": upload.hedges, "winner": upload.winner}
            self._metrics.stored(job.name, seconds, handles[0].object_size_bytes, **numbers)
            level = logging.INFO if upload.tries > 1 else logging.DEBUG
            if logger.isEnabledFor(level):
                facts = {"object": handles[0].object_key, "upload_attempts": upload.attempts}
                logger.log(level, "change sets uploaded", extra={**batch.fields, **facts})
        job.wake()
        self._start(self._release(job, batch, upload), self._late)

    async def _release(self, job: ActiveJob, batch: Batch, upload: Upload | None) -> None:
        """Wait for an upload's running attempts; one of an upload that was given up may still succeed."""
        if upload is not None:
            if await upload.ended():
                self._uploaded(job, batch, upload.handles)
                job.wake()
            self._metrics.loser_attempts.labels(job.name).inc(upload.attempts - (upload.winner > 0))
        job.book.released(batch.segments)
        self._room.freed()

    def _uploaded(self, job: ActiveJob, batch: Batch, handles: list[SegmentHandle]) -> None:
        for handle, segment in zip(handles, batch.segments, strict=True):
            if segment.id in batch.sent:
                self._cache.put(handle, segment.payload)
        job.book.uploaded(handles)
        self._cache.leave_room(self._jobs.in_flight_bytes)

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
