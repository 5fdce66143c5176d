"""
Lists a job's checkpoints, manages its savepoints, and forks it; fences no driver.

Owned by the event loop; store calls run in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dstl_service.checkpoints.fork import ForkReport
from dstl_service.formats.manifest import Manifest
from dstl_service.intake.active_jobs import ActiveJobs
from dstl_service.process.job_threads import RunInThread
from dstl_service.wire import CheckpointInfo, ForkRequest, JobInfo
from storage.errors import NotFoundError


class Catalog:
    """
    Lists checkpoints and savepoints. Every method raises `NotFoundError` for a job that is not stored.

    Args:
        jobs: The jobs of this process.
        in_thread: Runs a blocking call of a job.
        fork: Forks a job, see `dstl_service.checkpoints.fork.fork_job`.
    """

    def __init__(self, jobs: ActiveJobs, in_thread: RunInThread, fork: Callable[..., ForkReport]) -> None:
        self._jobs = jobs
        self._in_thread = in_thread
        self._fork = fork

    async def job(self, name: str) -> JobInfo:
        """Return a job's stored metadata."""
        job = await self._jobs.stored(name)
        latest, epoch = await self._in_thread(name, job.store.frontier)
        return JobInfo(
            job=name,
            job_uid=job.store.job_uid,
            epoch=epoch,
            max_parallelism=job.store.max_parallelism,
            latest=latest.info() if latest else None,
        )

    async def checkpoints(self, name: str) -> list[CheckpointInfo]:
        """Return all completed checkpoints, oldest first."""
        job = await self._jobs.stored(name)
        return await self._in_thread(name, job.store.listed)

    async def checkpoint(self, name: str, checkpoint_id: int) -> Manifest:
        """Return the newest generation of one checkpoint; `NotFoundError` if there is none."""
        job = await self._jobs.stored(name)
        manifest = await self._in_thread(name, job.store.newest_of, checkpoint_id)
        if manifest is None:
            raise NotFoundError(f"job {name!r} has no checkpoint {checkpoint_id}", job=name)
        return manifest

    async def savepoints(self, name: str) -> dict[str, CheckpointInfo]:
        """Return all savepoints of a job by name."""
        job = await self._jobs.stored(name)
        return await self._in_thread(name, lambda: {key: one.checkpoint for key, one in job.store.savepoints.infos()})

    async def create_savepoint(self, name: str, savepoint: str, checkpoint_id: int | None) -> CheckpointInfo:
        """Keep a checkpoint, by default the newest, under a name; see `SavepointStore.create`."""
        job = await self._jobs.stored(name)
        created = await self._in_thread(name, job.store.make_savepoint, savepoint, checkpoint_id)
        return created.info()

    async def delete_savepoint(self, name: str, savepoint: str) -> None:
        """Delete a savepoint; objects that only it named are collected later. `ConflictError` if a fork needs it."""
        job = await self._jobs.stored(name)
        await self._in_thread(name, job.store.delete_savepoint, savepoint)

    async def fork(self, name: str, fork: str, request: ForkRequest) -> ForkReport:
        """Create a job that begins with the state of another one; it may be repeated."""
        job = await self._jobs.stored(name)
        call = partial(
            self._fork,
            job.store,
            name,
            fork,
            savepoint=request.savepoint,
            checkpoint_id=request.checkpoint_id,
            max_parallelism=request.max_parallelism,
        )
        made: ForkReport = await self._in_thread(name, call)
        return made
