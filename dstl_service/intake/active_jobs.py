"""
The jobs of a service process.

All that is kept of them is a cache of the store, or change sets that are not durable yet. Owned by the event loop;
store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakValueDictionary

from dstl_service.intake.active_job import ActiveJob
from dstl_service.intake.change_sets import BatchSettings, ChangeSetTracker
from dstl_service.intake.held_sets import HeldSets
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from dstl_service.intake.unknown_job import no_such_epoch, no_such_job
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import validate_operator
from storage.clock import Clock, IdSource
from storage.errors import DstlError, NotFoundError
from storage.model import ChangeSetId
from storage.object_store import ObjectStore
from storage.validation import validate_name

logger = logging.getLogger("dstl_service")

IDLE_MS = 3_600_000
"""A job without a request for this time is assumed to have ended, or to be served elsewhere."""
_ABANDONED_MS = 7 * 24 * IDLE_MS
"""A driver that asks for change sets this late is told that they are lost, and executes the batch again."""


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

        For requests that follow from no other one here. Two requests more than `opened`, which returns a job that
        another service deleted until a batch or a restore notices it.
        """
        await self.forget_former(name)
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
        self._forget(job, "job was deleted")
        return True

    async def forget_former(self, name: str) -> bool:
        """
        Say whether what is known here of a name is of a former job; if so, drop what is held of that.

        It was deleted, see `forget_ended`, or its objects were removed by hand, without a tombstone: epochs count from
        the first one again. Two requests.
        """
        if await self.forget_ended(name):
            return True
        job = self._jobs.get(name)
        if job is None or not await self._is_removed(job):
            return False
        self._forget(job, "job was removed by hand")
        return True

    def _forget(self, job: ActiveJob, event: str) -> None:
        """Drop a job, unless another call has done it meanwhile."""
        if self._jobs.get(job.name) is job:
            logger.warning(event, extra={"job": job.name, "epoch": job.epoch})
            self.recreate(job.name)

    async def _is_removed(self, job: ActiveJob) -> bool:
        """Say whether the store no longer has what was read of a job, or learned of its epochs."""
        if job.store.job_uid:
            return await self._in_thread(job.name, job.store.is_replaced)
        return job.epoch > 0 and not await self._in_thread(job.name, job.store.has_epoch, job.epoch)

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
            if self.get(name).is_of(job_uid):
                await self.forget_ended(name)
            else:
                await self.forget_former(name)
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
