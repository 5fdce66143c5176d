"""
When calls to other services run: in threads of their own, so many for a host and in all, which jobs share.

A host that takes a connection and never answers holds up those who wait for it, for a while, and nobody else. Owned by
the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from weakref import WeakValueDictionary

from dstl_service.peers.client import PeerClient
from dstl_service.peers.registry import PeerRegistry
from dstl_service.process.fair_slots import FairSlots
from dstl_service.wire import ChangeSetRef
from storage.errors import UnavailableError
from storage.model import SegmentHandle


class PeerCalls:
    """
    Asks the services of other hosts.

    Args:
        client: Talks to one.
        registry: Says who may be asked.
        threads: Runs calls; a thread each.
        calls_max: Calls that run at a time, of which a job has at most half; see `dstl_service.process.shares`.
        calls_per_host_max: Those to one address, of which a job has at most half as well.
        patience_s: How long a call may wait for its turn.
    """

    def __init__(
        self,
        client: PeerClient,
        registry: PeerRegistry,
        threads: Executor,
        calls_max: int,
        calls_per_host_max: int,
        patience_s: float,
    ) -> None:
        self._client = client
        self._registry = registry
        self._threads = threads
        self._of_jobs = FairSlots(calls_max)
        self._calls_per_host_max = calls_per_host_max
        self._of_hosts: WeakValueDictionary[str, FairSlots] = WeakValueDictionary()  # there while they are of use
        self._patience_s = patience_s

    async def origin_of(self, job: str, url: str) -> str:
        """Return the address of a peer; see `PeerRegistry.check`."""
        return await self._registry.check(job, url)

    async def persist(
        self, origin: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None
    ) -> list[SegmentHandle]:
        """
        Have a peer persist sets and a note; see `PeerClient.persist`.

        Raises:
            UnavailableError: So many calls are under way that it was not asked; nothing is lost, ask again.
        """
        of_host = self._of_hosts.setdefault(origin, FairSlots(self._calls_per_host_max))
        try:
            async with asyncio.timeout(self._patience_s):
                await self._take_places(of_host, job)
        except TimeoutError:
            raise UnavailableError(
                f"service {origin} was not asked: other calls to it, or of job {job!r}, have waited for "
                f"{self._patience_s:g} s; ask again",
                job=job,
            ) from None
        ask = partial(self._client.persist, origin, job, refs, wait=wait, note=note)
        try:
            call = asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except BaseException:  # a system may have no thread left
            self._give_places_back(of_host, job)
            raise
        # The places are the thread's: who waited for it may be gone long before it ends.
        call.add_done_callback(lambda _: self._give_places_back(of_host, job))
        return await asyncio.shield(call)

    async def _take_places(self, of_host: FairSlots, job: str) -> None:
        """Take both places together: who waits for one keeps the other from nobody."""
        while True:
            await of_host.acquire(job)
            if self._of_jobs.acquire_at_once(job):
                return
            of_host.release(job)
            await self._of_jobs.acquire(job)
            if of_host.acquire_at_once(job):
                return
            self._of_jobs.release(job)

    def _give_places_back(self, of_host: FairSlots, job: str) -> None:
        self._of_jobs.release(job)
        of_host.release(job)
