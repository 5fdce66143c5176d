"""
Limits of links: memory for incomplete frames and for unanswered requests, and time of the event loop.

One job may take half of the memory, the next job half of the rest, and so on (`dstl_service.process.shares`). So a
client with the token of one job leaves room for the others, however many links it opens. Large frames are decoded
one at a time, the jobs in turn, and the loop then serves others for as long as that took. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dstl_service.links.frames import FRAME_BYTES_MAX
from dstl_service.process.fair_slots import FairSlots
from dstl_service.process.shares import SharedRoom, Shares

ROOM_BYTES = 4 * FRAME_BYTES_MAX
"""Memory for all links of a process: the costliest valid request, 100,000 references, fits beside a job's share."""


class LinkRoom(SharedRoom):
    """
    Counts the memory of the frames of all links of a process, in bytes.

    Args:
        bytes_max: The limit.
    """

    def __init__(self, bytes_max: int = ROOM_BYTES) -> None:
        # Nothing is reserved for newcomers: a share of bytes can be arbitrarily small.
        super().__init__(Shares(bytes_max, 1, 0))
        self._turns = FairSlots(1)

    @asynccontextmanager
    async def turn(self, job: str) -> AsyncIterator[None]:
        """Wait for the turn to decode a large frame; it blocks the loop at most half of the time."""
        loop = asyncio.get_running_loop()
        async with self._turns.held(job):
            begun_s = loop.time()
            yield
            await asyncio.sleep(loop.time() - begun_s)
