"""
Slots that jobs share by the rule of `shares`: no job can take all of them, or keep others waiting for long.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dstl_service.process.shares import SharedRoom, shares_of


class FairSlots:
    """
    At most `total` slots are held at a time; a free one goes to the waiting key, such as a job, that holds fewest.

    Among keys that hold equally many, it goes to the one that was served least recently. A holder may need several.

    Args:
        total: Number of slots.
    """

    def __init__(self, total: int) -> None:
        self._room = SharedRoom(shares_of(total))
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    @asynccontextmanager
    async def held(self, key: str, slots: int = 1) -> AsyncIterator[None]:
        """Hold this many slots within this context."""
        await self.acquire(key, slots)
        try:
            yield
        finally:
            self.release(key, slots)

    async def acquire(self, key: str, slots: int = 1) -> None:
        """Wait for slots, at most half of all, which every key may hold; `release` gives them back."""
        if self.acquire_at_once(key, slots):
            return
        turn = asyncio.get_running_loop().create_future(), slots
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn[0]
        except asyncio.CancelledError:
            if turn[0].done() and not turn[0].cancelled():
                self.release(key, slots)
            else:
                self._leave(key, turn)
            raise

    def acquire_at_once(self, key: str, slots: int = 1) -> bool:
        """Take slots if the key may have them now, and does not wait for others; say whether they were taken."""
        return key not in self._waiting and self._room.take(key, slots)

    def release(self, key: str, slots: int = 1) -> None:
        """Give slots back."""
        self._room.give_back(key, slots)
        self._hand_on()

    def _hand_on(self) -> None:
        while able := [key for key, turns in self._waiting.items() if self._room.admits(key, turns[0][1])]:
            key = min(able, key=self._room.held_by)
            turns = self._waiting.pop(key)
            turn, slots = turns.popleft()
            if turns:
                self._waiting[key] = turns  # re-queued last: many short calls of one key must not keep others waiting
            if not turn.cancelled():
                self._room.take(key, slots)
                turn.set_result(None)

    def _leave(self, key: str, turn: tuple[asyncio.Future[None], int]) -> None:
        turns = self._waiting.get(key)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[key]
        self._hand_on()  # the next turn may need fewer
