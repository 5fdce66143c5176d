"""Stops a process that nobody needs for a while: the embedded sidecar goes away with its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleWatch:
    """
    Calls `stop_process` after `idle_exit_s` seconds in which no request ran and nothing was done in the background.

    Owned by the event loop.

    Args:
        idle_exit_s: 0 never stops.
        stop_process: What is called.
        is_busy: Tells whether something is done in the background.
    """

    def __init__(
        self, idle_exit_s: int, stop_process: Callable[[], None], is_busy: Callable[[], bool] = lambda: False
    ) -> None:
        self._idle_exit_s = idle_exit_s
        self._stop_process = stop_process
        self._is_busy = is_busy
        self._touched = False
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        if self._idle_exit_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._idle_exit_s, self._check)

    def request_began(self) -> None:
        """Record a request; costs next to nothing, so that it can be done for each."""
        self._running += 1

    def request_ended(self) -> None:
        """Record its end, which of a restore may be long after its beginning."""
        self._running -= 1
        self._touched = True

    def stop(self) -> None:
        """End the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._touched or self._running or self._is_busy():
            self._touched = False
            self.start()
        else:
            self._stop_process()
