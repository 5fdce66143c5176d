"""
Takes jobs over: each open begins a new epoch, which fences every older driver.

Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

import logging

from dstl_service.collection.background_work import BackgroundWork
from dstl_service.collection.tombstones import Deletions
from dstl_service.intake.active_job import ActiveJobs
from dstl_service.process.job_threads import RunInThread
from dstl_service.wire import OpenedJob, OpenJob
from storage.errors import InvalidInputError
from storage.object_store import ObjectStore
from storage.open import is_same_storage
from storage.validation import validate_name

logger = logging.getLogger("dstl_service")


class JobOpener:
    """
    Opens jobs for their drivers.

    Args:
        jobs: The jobs of this process.
        store: Holds them.
        deletions: Knows the deleted jobs.
        background_work: Collects the garbage of jobs opened here.
        in_thread: Runs a blocking call of a job.
        service_id: Tells the driver who coordinates.
    """

    def __init__(
        self,
        jobs: ActiveJobs,
        store: ObjectStore,
        deletions: Deletions,
        background_work: BackgroundWork,
        in_thread: RunInThread,
        service_id: str,
    ) -> None:
        self._jobs = jobs
        self._store = store
        self._deletions = deletions
        self._background_work = background_work
        self._in_thread = in_thread
        self._service_id = service_id

    async def open(self, name: str, request: OpenJob) -> OpenedJob:
        """
        Take the job over with a new epoch; every older driver of it is fenced from now on.

        Raises:
            InvalidInputError: The name is invalid, or `max_parallelism` is, or differs from the job's; or the driver
                has another storage.
            ConflictError: The job is being deleted.
            FencedError: Another driver took it over meanwhile.
            DstlError: The storage cannot be written; says what to do.
        """
        validate_name("job", name)
        if request.storage and not await self._in_thread(name, is_same_storage, request.storage, self._store.url):
            raise InvalidInputError(
                f"job {name!r} has storage {request.storage!r}, but its service has {self._store.url!r}, where the "
                "state would go: give both the same storage, or the job another service (service, DSTL_SERVICE)",
                job=name,
            )
        await self._jobs.forget_ended(name)
        await self._forget_replaced(name)
        job = self._jobs.get(name)
        # One at a time: a repeated request must not get a higher epoch than the one whose answer is used.
        async with job.opening:
            await self._in_thread(name, self._store.check_writable)
            await self._in_thread(name, self._deletions.check, name)
            await self._in_thread(name, job.store.open, request.max_parallelism)
            epoch, latest = await self._in_thread(name, job.store.claim, request.owner)
            job.learn_epoch(epoch)
            # A deletion puts the tombstone, then claims an epoch, so one of the two sees the other.
            await self._in_thread(name, self._deletions.check, name)
            await self._in_thread(name, job.store.check_not_ended)  # the tombstone is deleted last
            # The checks took time: `latest` may be stale.
            await self._in_thread(name, job.store.check_still_newest, epoch)
            job.check_epoch(epoch)
            job.owned_epoch = epoch
        self._background_work.start_collector(job)
        logger.info("job opened", extra={"job": name, "epoch": epoch, "checkpoint_id": latest.id if latest else None})
        return OpenedJob(
            job=name,
            job_uid=job.store.job_uid,
            epoch=epoch,
            max_parallelism=job.store.max_parallelism,
            service_id=self._service_id,
            latest=latest.info() if latest else None,
        )

    async def _forget_replaced(self, name: str) -> None:
        """
        Drop what is held of a job whose objects were deleted by hand, as to start over.

        Epochs of the next job of its name begin at 1 again: it would be refused as if an older driver opened it. Only a
        takeover looks: it fences a running driver anyway, whose ``job.json`` may just be lost.
        """
        job = self._jobs.get(name)
        if await self._in_thread(name, job.store.is_replaced) and self._jobs.get(name) is job:
            logger.warning("job has no objects any more", extra={"job": name, "epoch": job.epoch})
            self._jobs.recreate(name)
