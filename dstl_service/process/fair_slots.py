"""
Slots that jobs share by the rule of `shares`: no job can take all of them, or keep others waiting for long.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dstl_service.process.shares import shares_of


class FairSlots:
    """
    At most `total` holders at a time; a free slot goes to the waiting key, such as a job, that holds fewest.

    Among keys that hold equally many, it goes to the one that was served least recently.

    Args:
        total: Number of slots.
    """

    def __init__(self, total: int) -> None:
        self._shares = shares_of(total)
        self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def held(self, key: str) -> AsyncIterator[None]:
        """Hold a slot within this context."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: str) -> None:
        """Wait for a slot; `release` gives it back."""
        if self.acquire_at_once(key):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(key)
            else:
                self._leave(key, turn)
            raise

    def acquire_at_once(self, key: str) -> bool:
        """Take a slot if the key may have one now; say whether it was taken."""
        may_hold = self._may_hold(key)  # keys that wait while a slot is free hold their share already
        if may_hold:
            self._take(key)
        return may_hold

    def release(self, key: str) -> None:
        """Give a slot back."""
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._hand_on()

    def _may_hold(self, key: str) -> bool:
        return self._shares.admits(self._held.get(key, 0), 1, self._free)

    def _take(self, key: str) -> None:
        self._free -= 1
        self._held[key] += 1

    def _hand_on(self) -> None:
        while able := [key for key in self._waiting if self._may_hold(key)]:
            key = min(able, key=self._held.__getitem__)
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # re-queued last: many short calls of one key must not keep others waiting
            if not turn.cancelled():
                self._take(key)
                turn.set_result(None)

    def _leave(self, key: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(key)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[key]
