"""
Limits of links: memory for incomplete frames and for unanswered requests, and time of the event loop.

One job may take half of the memory, the next job half of the rest, and so on (`dstl_service.process.shares`). So a
client with the token of one job leaves room for the others, however many links it opens. Large frames are decoded
one at a time, the jobs in turn, and the loop then serves others for as long as that took. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

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


class FrameRoom:
    """
    The room of one link.

    Args:
        room: The room of all links.
        job: The link's job.
    """

    def __init__(self, room: LinkRoom, job: str) -> None:
        self._room = room
        self._job = job
        self._incomplete_bytes = 0

    def hold_incomplete(self, size_bytes: int) -> bool:
        """Hold this many bytes for the incomplete frame, instead of those before; say whether there is room."""
        more = size_bytes - self._incomplete_bytes
        if more > 0 and not self._room.take(self._job, more):
            return False
        if more < 0:
            self._room.give_back(self._job, -more)
        self._incomplete_bytes = size_bytes
        return True

    def turn(self) -> AbstractAsyncContextManager[None]:
        """See `LinkRoom.turn`."""
        return self._room.turn(self._job)

    def take(self, size_bytes: int) -> bool:
        """Hold bytes until `give_back`; say whether there is room for them."""
        return self._room.take(self._job, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        """Hold fewer bytes."""
        self._room.give_back(self._job, size_bytes)
