"""
What a service holds of its jobs: of each, what is known of its epoch, its change sets and what runs for it.

All of it is a cache of the store, or sets that are not durable yet. Owned by the event loop; store calls run in
threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from dstl_service.intake.change_sets import BatchSettings, ChangeSetTracker
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import validate_operator
from storage.clock import Clock, IdSource
from storage.errors import DstlError, FencedError, NotFoundError
from storage.model import ChangeSetId, validate_name
from storage.object_store import ObjectStore

logger = logging.getLogger("dstl_service")

IDLE_MS = 3_600_000
"""A job that nobody asked for during this time is taken to have ended, or to be served elsewhere."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveJob:
    """What one service holds of one job to take its change sets in; others keep what they need by it."""

    name: str
    store: JobStore
    book: ChangeSetTracker
    room: InFlightLimiter
    used_ms: int = 0
    epoch: int = 0
    owned_epoch: int = 0
    """The newest epoch that was begun here, by which this service is the job's coordinator."""
    newest_id: int = -1
    turn: int = 0
    """Counts begins and aborts: what was asked for before one of them is not carried out after it."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    look: asyncio.Task[bool | None] | None = None
    """Asks whether the job was deleted before the newest checkpoint began."""
    looked_id: int = -1
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: str | None = None
    timer: asyncio.TimerHandle | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when this is forgotten as the job's objects were deleted."""

    def wake(self) -> None:
        """Let those who wait for sets, or for room, look again; who comes later waits for the next change."""
        self.room.freed()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def is_of(self, job_uid: str) -> bool:
        """Say whether this is known to be the job of this uid; without one, any is."""
        return job_uid in ("", self.store.job_uid)

    def knows(self, epoch: int) -> bool:
        """Say whether this epoch, or a newer one, is known to have begun."""
        return self.epoch > 0 and epoch <= self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Return if this epoch owns the job, for all that is known here; `FencedError` if a newer one does."""
        if epoch < self.epoch:
            raise FencedError.taken_over(self.name, epoch, self.epoch)
        if not self.knows(epoch):
            raise _no_such_epoch(self.name, epoch)

    def learn_epoch(self, epoch: int) -> None:
        """Note that an epoch has begun, of which the store is the proof: nobody's word alone fences a job (I4)."""
        if epoch > self.epoch:
            logger.info("newer epoch", extra={"job": self.name, "epoch": epoch, "older_epoch": self.epoch})
            self.epoch, self.newest_id, self.looked_id = (
                epoch,
                -1,
                -1,
            )  # a new owner may go on from an earlier checkpoint
            self.book.forget_epochs_before(epoch)
            self.wake()

    async def discard_attempt(self, checkpoint_id: int) -> None:
        """Forget what was sent for a checkpoint; no earlier try at it can come to exist any more."""
        self.turn += 1
        async with self.writing:  # a manifest that is being written has come to exist, or has not, when this returns
            self.book.forget_up_to(checkpoint_id)
            self.wake()


def _no_such_epoch(name: str, epoch: int) -> NotFoundError:
    return NotFoundError(
        f"job {name!r} has no epoch {epoch}: it was deleted, or never opened; open the job first "
        f"(POST /v1/jobs/{name}/epochs), and send the epoch that is answered",
        job=name,
    )


def _no_such_job(name: str, job_uid: str) -> NotFoundError:
    return NotFoundError(
        f"there is no job {name!r} of uid {job_uid[:64]}: it was deleted, and another one may have its name; start the "
        "query anew",
        job=name,
    )


class ActiveJobs:
    """
    The jobs that a process has seen.

    Args:
        store: Where they are.
        clock: For what is stored of them.
        ids: For what is stored of them.
        batch: When their change sets are uploaded.
        room: What their change sets share.
        in_thread: Runs a blocking call of a job.
    """

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        ids: IdSource,
        batch: BatchSettings,
        room: InFlightLimiter,
        in_thread: RunInThread,
    ) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._batch = batch
        self._room = room
        self._in_thread = in_thread
        self._jobs: dict[str, ActiveJob] = {}
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __iter__(self) -> Iterator[ActiveJob]:
        """Iterate over the jobs, in the order in which they were seen."""
        return iter(self._jobs.values())

    @property
    def names(self) -> list[str]:
        """The jobs that this process has seen, in order."""
        return sorted(self._jobs)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of change sets that are held, over all jobs."""
        return sum(job.book.in_flight_bytes for job in self)

    def in_flight_bytes_of(self, name: str | None) -> int:
        """Bytes of change sets that are held of one job, or of all."""
        if name is None:
            return self.in_flight_bytes
        job = self._jobs.get(name)
        return 0 if job is None else job.book.in_flight_bytes

    def get(self, name: str) -> ActiveJob:
        """Return the job, which may be one that was not opened here or does not exist."""
        job = self._jobs.get(name)
        if job is None:
            validate_name("job", name)
            self.evict_idle()
            store = JobStore(self._store, name, self._clock, self._ids)
            job = self._jobs[name] = ActiveJob(name, store, ChangeSetTracker(self._batch), self._room)
        job.used_ms = self._clock.monotonic_ms()
        return job

    def recreate(self, name: str) -> ActiveJob:
        """Forget a job whose objects were deleted, and return the new one that has its name."""
        job = self._jobs.pop(name)
        for end in job.at_end:
            end()
        return self.get(name)

    def evict_idle(self) -> None:
        """Let go of what is kept of idle jobs and can be read again, or a service would grow with every job it saw."""
        idle_ms = self._clock.monotonic_ms() - IDLE_MS
        for job in list(self):
            if job.used_ms < idle_ms:
                job.store.forget()
                self._drop_unknown(job)

    async def opened(self, name: str) -> ActiveJob:
        """Return the job, reading ``job.json`` if this process has not seen it yet."""
        job = self.get(name)
        if not job.store.job_uid:
            if await self.forget_ended(name):
                job = self.get(name)
            if not await self._in_thread(name, job.store.exists):
                self._drop_unknown(job)
                raise NotFoundError(f"there is no job {name!r} in {self._store.url}", job=name)
            await self._in_thread(name, job.store.open, None)
        return job

    def _drop_unknown(self, job: ActiveJob) -> None:
        """Keep no name that was only asked for: of such a job, nothing was read, sent or begun here."""
        is_known = job.store.job_uid or job.epoch or job.opening.locked() or job.book.in_flight_bytes
        if not is_known and self._jobs.get(job.name) is job:
            del self._jobs[job.name]

    async def known(self, name: str, epoch: int, job_uid: str = "") -> ActiveJob:
        """
        Return the job after this epoch, or a newer one, was seen in the store.

        Args:
            name: The job's.
            epoch: Of whoever asks.
            job_uid: Of the job that is meant, if that is told: one of this name may have been deleted, and its epochs,
                checkpoints and attempts come again.

        Raises:
            NotFoundError: The store has neither job nor epoch. Nothing was fenced, and nothing is kept of the name.
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
        Say whether a job of which anything is known here was deleted; what was kept of it is forgotten then.

        To know its life is enough: who was refused when it was opened, or asked for an epoch, may come again.
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
        Look in the background whether a job was deleted, once for each checkpoint that begins.

        A query, or a task, that runs on is told so: its sets would be stored for nobody. `check_not_ended` waits for
        the look.
        """
        if checkpoint_id > job.looked_id:
            job.looked_id = checkpoint_id
            job.look = asyncio.get_running_loop().create_task(self._ended(job))

    async def check_not_ended(self, job: ActiveJob) -> None:
        """
        Return if a job was still there when its running checkpoint began.

        So nothing of a batch that began after the end of a deletion is acknowledged. A checkpoint that was completed
        while the job was deleted is deleted like those before it.

        Raises:
            NotFoundError: It was deleted.
            UnavailableError: The store does not tell; ask again.
        """
        look = job.look
        if look is None:
            return
        has_ended = await asyncio.shield(look)  # who asks again needs the answer, though this one may be given up
        if has_ended is None:
            has_ended = await self.forget_ended(job.name)
        if job.look is look:  # else a new owner's batch has begun meanwhile, and needs its own
            job.look = None
        if has_ended or self._jobs.get(job.name) is not job:
            raise _no_such_epoch(job.name, job.epoch)

    async def _ended(self, job: ActiveJob) -> bool | None:
        try:
            return await self.forget_ended(job.name)
        except DstlError as error:  # whoever needs to know asks again
            logger.warning("it is not known whether the job was deleted", extra={"job": job.name, "error": str(error)})
            return None

    async def _look_for(self, name: str, epoch: int, job_uid: str) -> None:
        """Learn of an epoch that the store has; of one job, one request at a time looks, whatever is claimed."""
        validate_name("job", name)
        async with self._asking.setdefault(name, asyncio.Lock()):
            job = self._jobs.get(name)
            if job is not None and job.knows(epoch) and job.is_of(job_uid):
                return
            store = JobStore(self._store, name, self._clock, self._ids) if job is None else job.store
            if not epoch or not await self._in_thread(name, store.has_epoch, epoch):
                raise _no_such_epoch(name, epoch)
            await self.forget_ended(name)
            job = self.get(name)
            job.store.enter_life_of(epoch)
            if job_uid and not job.store.job_uid and await self._in_thread(name, job.store.exists):
                await self._in_thread(name, job.store.open, None)
            if not job.is_of(job_uid):
                raise _no_such_job(name, job_uid)
            job.learn_epoch(epoch)

    def admit(self, set_id: ChangeSetId) -> ActiveJob:
        """
        Return the job of a set that may be taken in; forget what its checkpoint makes obsolete.

        Raises:
            NotFoundError: Its epoch is not known; `known` asks for it.
            FencedError: A newer epoch is known here.
        """
        validate_name("job", set_id.job)
        validate_operator(set_id.operator)
        job = self.get(set_id.job)
        job.check_epoch(set_id.writer.epoch)
        if set_id.checkpoint_id > job.newest_id:
            # A checkpoint begins when the one before exists. Only the coordinator is told; other hosts see it here.
            job.newest_id = set_id.checkpoint_id
            self.begin_look(job, set_id.checkpoint_id)
            job.book.forget_up_to(set_id.checkpoint_id - 1)
            job.wake()
        return job
