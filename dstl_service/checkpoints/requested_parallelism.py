"""
Tells drivers what parallelism was requested for their operators.

A request is kept in the store (`dstl_service.registry.parallelism_requests`), so that it reaches the coordinator from
any host. The coordinator looks for it every few seconds, beside the checkpoints, while the job has some. Owned by the
event loop; store calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from dstl_service.intake.active_job import ActiveJob
from dstl_service.process.job_threads import RunInThread
from dstl_service.registry.parallelism_requests import WantedParallelism
from storage.clock import Clock
from storage.errors import DstlError

LOOK_MS = 10_000
"""Time between two looks for requests of one job."""

logger = logging.getLogger("dstl_service")


@dataclass(slots=True)
class _Known:
    """The newest known requests of one epoch, and when to look again."""

    epoch: int
    look_ms: int
    wanted: dict[str, WantedParallelism] = field(default_factory=dict)
    look: asyncio.Task[None] | None = None


class RequestedParallelism:
    """
    The requests for the jobs of this process.

    Args:
        in_thread: Runs a blocking call of a job.
        clock: Tells when to look again.
    """

    def __init__(self, in_thread: RunInThread, clock: Clock) -> None:
        self._in_thread = in_thread
        self._clock = clock
        self._known: WeakKeyDictionary[ActiveJob, _Known] = WeakKeyDictionary()

    def of(self, job: ActiveJob, epoch: int) -> dict[str, WantedParallelism]:
        """Return the known requests, by operator; look for more in the background. Never blocks."""
        known = self._known.get(job)
        if known is None or known.epoch != epoch:
            known = self._known[job] = _Known(epoch, self._clock.monotonic_ms() + LOOK_MS)
        if self._clock.monotonic_ms() >= known.look_ms and known.look is None:
            known.look = asyncio.get_running_loop().create_task(self._look(job, known))
        return known.wanted

    async def request(self, job: ActiveJob, operator: str, parallelism: int) -> dict[str, WantedParallelism]:
        """
        Request a parallelism; return all requests in the job's newest epoch.

        Raises:
            NotFoundError: The newest checkpoint has no such operator.
            InvalidInputError: The parallelism is out of bounds.
        """
        epoch, wanted = await self._in_thread(job.name, job.store.request_parallelism, operator, parallelism)
        self._known[job] = _Known(epoch, self._clock.monotonic_ms() + LOOK_MS, wanted)
        return wanted

    async def _look(self, job: ActiveJob, known: _Known) -> None:
        try:
            known.wanted = await self._in_thread(job.name, job.store.parallelism_requests.of, known.epoch)
        except DstlError as error:
            logger.warning("requests for a parallelism were not read", extra={"job": job.name, "error": str(error)})
        finally:
            known.look_ms, known.look = self._clock.monotonic_ms() + LOOK_MS, None
