"""
Calls to other services: each in a thread, bounded per host and overall; jobs share both bounds.

A host that accepts connections and never answers delays only the calls to it. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from weakref import WeakValueDictionary

from dstl_service.peers.addresses import PeerRegistry
from dstl_service.peers.client import PeerClient
from dstl_service.process.fair_slots import FairSlots
from dstl_service.wire import ChangeSetRef
from storage.errors import UnavailableError
from storage.model import SegmentHandle


class PeerCalls:
    """
    Calls the services of other hosts.

    Args:
        client: Performs a call.
        registry: Decides which addresses may be called.
        threads: Runs each call in a thread of its own.
        calls_max: Calls that run at the same time; a job has at most half of them, see `dstl_service.process.shares`.
        calls_per_host_max: Calls to one address that run at the same time; a job has at most half of them.
        patience_s: Longest wait of a call for its turn.
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
        self._of_hosts: WeakValueDictionary[str, FairSlots] = WeakValueDictionary()  # dropped when unused
        self._patience_s = patience_s

    async def origin_of(self, job: str, url: str) -> str:
        """Return the origin of a peer's URL if it may be called; see `PeerRegistry.check`."""
        return await self._registry.check(job, url)

    async def persist(
        self, origin: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None
    ) -> list[SegmentHandle]:
        """
        Have a peer persist sets and a note; see `PeerClient.persist`.

        Raises:
            UnavailableError: No slot became free in time, so the peer was not called; nothing is lost, ask again.
        """
        of_host = self._of_hosts.setdefault(origin, FairSlots(self._calls_per_host_max))
        try:
            async with asyncio.timeout(self._patience_s):
                await self._take_places(of_host, job)
        except TimeoutError:
            raise UnavailableError(
                f"service {origin} was not called: other calls to it, or of job {job!r}, took all slots for "
                f"{self._patience_s:g} s; ask again",
                job=job,
            ) from None
        ask = partial(self._client.persist, origin, job, refs, wait=wait, note=note)
        try:
            call = asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except BaseException:  # the system may be out of threads
            self._give_places_back(of_host, job)
            raise
        # The slots belong to the thread, which may outlive its cancelled caller.
        call.add_done_callback(lambda _: self._give_places_back(of_host, job))
        return await asyncio.shield(call)

    async def _take_places(self, of_host: FairSlots, job: str) -> None:
        """Take both slots together; a call that waits for one does not hold the other."""
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
