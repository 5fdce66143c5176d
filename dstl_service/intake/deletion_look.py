"""Checks in the background whether a job was deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class DeletionLook:
    """
    The checks for the deletion of one job: one runs, and at most one waits for it. Owned by the event loop.

    A caller may name a later checkpoint with each request, so checks must not pile up while the store is slow.
    """

    def __init__(self) -> None:
        self.newest: asyncio.Task[bool | None] | None = None
        """The check that began last, or waits; its result is None if the store did not answer."""
        self._running = asyncio.Lock()
        self._is_waiting = False
        self._looked_id = -1

    def begin(self, checkpoint_id: int, look: Callable[[], Awaitable[bool | None]]) -> None:
        """Check once for each checkpoint that begins."""
        if checkpoint_id <= self._looked_id:
            return
        self._looked_id = checkpoint_id
        if self.newest is None or not self._is_waiting:  # one that waits begins later than this checkpoint
            self._is_waiting = True
            self.newest = asyncio.get_running_loop().create_task(self._in_turn(look))

    def forget_checkpoints(self) -> None:
        """Count checkpoints from the start, in a new epoch."""
        self._looked_id = -1

    async def _in_turn(self, look: Callable[[], Awaitable[bool | None]]) -> bool | None:
        async with self._running:
            self._is_waiting = False
            return await look()
