"""
The jobs of a service process: for each, its known epoch, its change sets and its running work.

All of it is a cache of the store, or change sets that are not durable yet. Owned by the event loop; store calls run in
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from dstl_service.intake.change_sets import BatchSettings, ChangeSetTracker
from dstl_service.intake.deletion_look import DeletionLook
from dstl_service.intake.held_sets import HeldSets
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from dstl_service.intake.unknown_job import no_such_epoch, no_such_job
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import validate_operator
from storage.clock import Clock, IdSource
from storage.errors import DstlError, FencedError, NotFoundError
from storage.model import ChangeSetId
from storage.object_store import ObjectStore
from storage.validation import validate_name

logger = logging.getLogger("dstl_service")

IDLE_MS = 3_600_000
"""A job without a request for this time is assumed to have ended, or to be served elsewhere."""
_ABANDONED_MS = 7 * 24 * IDLE_MS
"""A driver that asks for change sets this late is told that they are lost, and executes the batch again."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveJob:
    """One job in one service process, as the intake needs it; other parts key their own state by it."""

    name: str
    store: JobStore
    book: ChangeSetTracker
    room: InFlightLimiter
    used_ms: int = 0
    epoch: int = 0
    owned_epoch: int = 0
    """The newest epoch that was begun or completed a checkpoint here; with it, this service is the coordinator."""
    newest_id: int = -1
    turn: int = 0
    """Counts begins and aborts; a request from before one of them is not carried out after it."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    look: DeletionLook = field(default_factory=DeletionLook)
    """Background check whether the job was deleted before the newest checkpoint began."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: str | None = None
    timer: asyncio.TimerHandle | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when this is dropped."""
    needed_by: list[Callable[[], bool]] = field(default_factory=list)
    """Say whether work for the job runs, so that this is not dropped although the job is idle."""

    def wake(self) -> None:
        """Wake all waiters for sets or for room; later ones wait for the next change."""
        self.room.freed()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def is_of(self, job_uid: str) -> bool:
        """Say whether the job is known to have this uid; an empty uid matches every job."""
        return job_uid in ("", self.store.job_uid)

    def knows(self, epoch: int) -> bool:
        """Say whether this or a newer epoch is known to have begun."""
        return self.epoch > 0 and epoch <= self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Check that this epoch owns the job, as known here; else `FencedError` (a newer one) or `NotFoundError`."""
        if epoch < self.epoch:
            raise FencedError.taken_over(self.name, epoch, self.epoch)
        if not self.knows(epoch):
            raise no_such_epoch(self.name, epoch)

    def learn_epoch(self, epoch: int) -> None:
        """Note an epoch that the store has; a caller's claim alone never fences a job (I4)."""
        if epoch > self.epoch:
            logger.info("newer epoch", extra={"job": self.name, "epoch": epoch, "older_epoch": self.epoch})
            # A new owner may continue from an earlier checkpoint.
            self.epoch, self.newest_id = epoch, -1
            self.look.forget_checkpoints()
            self.book.forget_epochs_before(epoch)
            self.wake()

    async def discard_attempt(self, checkpoint_id: int) -> None:
        """Drop the sets of this and earlier checkpoints; no earlier try at this one can complete any more."""
        self.turn += 1
        async with self.writing:  # waits until a manifest that is being written exists, or has failed
            self.book.forget_up_to(checkpoint_id)
            self.wake()


class ActiveJobs:
    """
    The jobs that a process has seen.

    Args:
        store: The storage.
        clock: Tells idle jobs; timestamps of registries.
        ids: Unique names of registries' objects.
        batch: When change sets are uploaded.
        room: The room that the change sets of all jobs share.
        in_thread: Runs a job's blocking call.
        evicted: Called with the names of jobs that were dropped because they are idle.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        ids: IdSource,
        batch: BatchSettings,
        room: InFlightLimiter,
        in_thread: RunInThread,
        evicted: Callable[[set[str]], object],
    ) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._batch = batch
        self._room = room
        self._in_thread = in_thread
        self._evicted = evicted
        self._has_reached_any = False
        self._held = HeldSets()
        self._jobs: dict[str, ActiveJob] = {}
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __iter__(self) -> Iterator[ActiveJob]:
        """Iterate over the jobs, in the order in which they were first seen."""
        return iter(self._jobs.values())

    @property
    def names(self) -> list[str]:
        """The names of the jobs that this process has seen, sorted."""
        return sorted(self._jobs)

    @property
    def is_any_reached(self) -> bool:
        """Whether any job was found in the store or created there."""
        return self._has_reached_any or any(job.store.job_uid or job.epoch for job in self)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of change sets in flight, over all jobs, those that late attempts of dropped jobs hold included."""
        return self._held.in_flight_bytes

    def in_flight_bytes_of(self, name: str | None) -> int:
        """Bytes of change sets in flight, of one job or, for None, of all."""
        if name is None:
            return self.in_flight_bytes
        job = self._jobs.get(name)
        return 0 if job is None else job.book.in_flight_bytes

    def get(self, name: str) -> ActiveJob:
        """Return the job, whether or not it was opened here or exists in the store."""
        job = self._jobs.get(name)
        if job is None:
            validate_name("job", name)
            self.evict_idle()
            store = JobStore(self._store, name, self._clock, self._ids)
            book = ChangeSetTracker(self._batch, self._held)
            job = self._jobs[name] = ActiveJob(name, store, book, self._room)
        job.used_ms = self._clock.monotonic_ms()
        return job

    def recreate(self, name: str) -> ActiveJob:
        """Drop a deleted job with its change sets, and return a fresh entry for its name."""
        self._drop(self._jobs[name])
        return self.get(name)

    def evict_idle(self) -> None:
        """Drop idle jobs, and of those that hold sets what can be read again; for the others this is like a restart."""
        now_ms, dropped = self._clock.monotonic_ms(), set()
        for job in [job for job in self if now_ms - job.used_ms > IDLE_MS]:
            job.store.forget()
            is_over = job.book.is_empty or now_ms - job.used_ms > _ABANDONED_MS
            if is_over and not (
                job.opening.locked() or job.writing.locked() or any(needs() for needs in job.needed_by)
            ):
                self._has_reached_any |= bool(job.store.job_uid or job.epoch)
                self._drop(job)
                dropped.add(job.name)
        if dropped:
            self._evicted(dropped)

    def _drop(self, job: ActiveJob) -> None:
        del self._jobs[job.name]
        job.book.close()
        job.wake()
        for end in job.at_end:
            end()

    async def opened(self, name: str) -> ActiveJob:
        """Return the job; read ``job.json`` if it is not known yet. `NotFoundError` if the store has no such job."""
        job = self.get(name)
        if not job.store.job_uid:
            if await self.forget_ended(name):
                job = self.get(name)
            if not await self._in_thread(name, job.store.exists):
                self._drop_unknown(job)
                raise NotFoundError(f"there is no job {name!r} in {self._store.url}", job=name)
            await self._in_thread(name, job.store.open, None)
        return job

    async def stored(self, name: str) -> ActiveJob:
        """
        Return the job that has this name now, as `opened` does; what is held of a deleted one is dropped.

        For requests that follow from no other one here. One request more than `opened`, which returns a job that
        another service deleted until a batch or a restore notices it.
        """
        await self.forget_ended(name)
        return await self.opened(name)

    def _drop_unknown(self, job: ActiveJob) -> None:
        """Drop a job of which nothing was read, received or begun here; a mere request must not keep its name."""
        is_known = job.store.job_uid or job.epoch or job.opening.locked() or job.book.in_flight_bytes
        if not is_known and self._jobs.get(job.name) is job:
            del self._jobs[job.name]

    async def known(self, name: str, epoch: int, job_uid: str = "") -> ActiveJob:
        """
        Return the job after this or a newer epoch was seen in the store.

        Args:
            name: Name of the job.
            epoch: The caller's epoch.
            job_uid: Uid of the job that the caller means; empty if unknown. A deleted job of this name may have had
                the same epochs, checkpoints and attempts.

        Raises:
            NotFoundError: The store has no such job or epoch. Nothing was fenced, and the name is not kept.
        """
        job = self._jobs.get(name)
        if job is None or not job.knows(epoch) or not job.is_of(job_uid):
            await self._look_for(name, epoch, job_uid)
        return self.get(name)

    async def owned(self, name: str, epoch: int, job_uid: str = "") -> ActiveJob:
        """Return the job if this epoch owns it; see `known` and `ActiveJob.check_epoch`."""
        job = await self.known(name, epoch, job_uid)
        job.check_epoch(epoch)
        return job

    async def forget_ended(self, name: str) -> bool:
        """
        Say whether a job that is known here was deleted; if so, drop what is held of it.

        A job counts as known once its life is: a driver that was refused at opening, or a task that sent an epoch, may
        retry.
        """
        job = self._jobs.get(name)
        if job is None or not await self._in_thread(name, job.store.has_ended):
            return False
        if self._jobs.get(name) is job:
            logger.warning("job was deleted", extra={"job": name, "epoch": job.epoch})
            self.recreate(name)
        return True

    def begin_look(self, job: ActiveJob, checkpoint_id: int) -> None:
        """
        Check in the background whether a job was deleted, once for each checkpoint that begins.

        A query or task that still runs gets an error: its sets would be stored for nothing. `check_not_ended` waits
        for this check.
        """
        job.look.begin(checkpoint_id, partial(self._ended, job))

    async def check_not_ended(self, job: ActiveJob) -> None:
        """
        Check that a job still existed when its running checkpoint began.

        Thus no batch that began after the end of a deletion is acknowledged. A checkpoint that completed during the
        deletion is deleted like those before it.

        Raises:
            NotFoundError: The job was deleted.
            UnavailableError: The store did not answer; ask again.
        """
        look = job.look.newest
        if look is None:
            return
        has_ended = await asyncio.shield(look)  # a retried request needs the answer if this one is cancelled
        if has_ended is None:
            has_ended = await self.forget_ended(job.name)
        if job.look.newest is look:  # else a newer batch has begun, and needs its own check
            job.look.newest = None
        if has_ended or self._jobs.get(job.name) is not job:
            raise no_such_epoch(job.name, job.epoch)

    async def _ended(self, job: ActiveJob) -> bool | None:
        try:
            return await self.forget_ended(job.name)
        except DstlError as error:  # `check_not_ended` repeats the check
            logger.warning(
                "the store did not tell whether the job was deleted", extra={"job": job.name, "error": str(error)}
            )
            return None

    async def _look_for(self, name: str, epoch: int, job_uid: str) -> None:
        """Look up a claimed epoch in the store and learn it; one lookup at a time for each job name."""
        validate_name("job", name)
        async with self._asking.setdefault(name, asyncio.Lock()):
            job = self._jobs.get(name)
            if job is not None and job.knows(epoch) and job.is_of(job_uid):
                return
            store = JobStore(self._store, name, self._clock, self._ids) if job is None else job.store
            if not epoch or not await self._in_thread(name, store.has_epoch, epoch):
                raise no_such_epoch(name, epoch)
            await self.forget_ended(name)
            job = self.get(name)
            job.store.enter_life_of(epoch)
            if job_uid and not job.store.job_uid and await self._in_thread(name, job.store.exists):
                await self._in_thread(name, job.store.open, None)
            if not job.is_of(job_uid):
                raise no_such_job(name, job_uid)
            job.learn_epoch(epoch)

    def admit(self, set_id: ChangeSetId) -> ActiveJob:
        """
        Return the job of a set that may be taken in; drop sets that its checkpoint makes obsolete.

        Raises:
            NotFoundError: Its epoch is not known here; call `known` first.
            FencedError: A newer epoch is known here.
        """
        validate_operator(set_id.operator)
        job = self.get(set_id.job)
        job.check_epoch(set_id.writer.epoch)
        if set_id.checkpoint_id > job.newest_id:
            # A checkpoint begins once the one before exists. Only the coordinator is told; other hosts learn it here.
            job.newest_id = set_id.checkpoint_id
            self.begin_look(job, set_id.checkpoint_id)
            job.book.forget_up_to(set_id.checkpoint_id - 1)
            job.wake()
        return job
