"""One check for all callers that ask at the same time, and shortly after it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from storage.clock import Clock

KEPT_MS = 1_000
"""How long a good answer counts for later callers."""


class SharedCheck:
    """
    A check that costs requests: callers share a running one, and its good answer for `KEPT_MS`; errors are not kept.

    So a caller causes one check a second at most, however often it asks. Owned by the event loop.

    Args:
        check: Returns, or raises why not.
        clock: Measures the age of an answer.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], clock: Clock) -> None:
        self._check = check
        self._clock = clock
        self._running: asyncio.Task[None] | None = None
        self._good_until_ms = -1

    async def ask(self) -> None:
        """Share the check, or raise its error; the check continues if a caller is cancelled."""
        if self._clock.monotonic_ms() < self._good_until_ms:
            return
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
            self._running.add_done_callback(self._ended)
        await asyncio.shield(self._running)

    async def _run(self) -> None:
        await self._check()
        self._good_until_ms = self._clock.monotonic_ms() + KEPT_MS

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # all callers may have gone
