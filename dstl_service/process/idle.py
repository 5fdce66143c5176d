"""Stops an idle process: an auto-started sidecar ends after its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_UNUSED_CHECK_S = 10


class IdleWatch:
    """
    Calls `stop_process` after at least `idle_exit_s` seconds without requests and background work.

    The check runs every `idle_exit_s`, so the stop comes within twice that time. A process that answered requests and
    reached no job ends sooner: it may have wrong credentials, and its successor has those of the user that starts
    it. Owned by the event loop.

    Args:
        idle_exit_s: Idle time in seconds; 0 never stops.
        stop_process: Stops the process.
        is_busy: Says whether background work runs.
        is_used: Says whether any job was reached in the store.
    """

    def __init__(
        self,
        idle_exit_s: int,
        stop_process: Callable[[], None],
        is_busy: Callable[[], bool] = lambda: False,
        is_used: Callable[[], bool] = lambda: True,
    ) -> None:
        self._idle_exit_s = idle_exit_s
        self._stop_process = stop_process
        self._is_busy = is_busy
        self._is_used = is_used
        self._wait_s = 0
        self._idle_s = 0
        self._touched = False
        self._running = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether requests or background work run."""
        return self._running > 0 or self._is_busy()

    def start(self) -> None:
        """Start the watch."""
        if self._idle_exit_s > 0:
            self._wait_s = self._idle_exit_s if self._is_used() else min(_UNUSED_CHECK_S, self._idle_exit_s)
            self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._check)

    def request_began(self) -> None:
        """Record the start of a request; cheap enough for every request."""
        self._running += 1

    def request_ended(self) -> None:
        """Record the end of a request; a restore may run for long."""
        self._running -= 1
        self._touched = True

    def stop(self) -> None:
        """Stop the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        touched, self._touched = self._touched, False
        is_in_use = self.is_in_use or (touched and self._is_used())
        self._idle_s = 0 if is_in_use or touched else self._idle_s + self._wait_s
        if not is_in_use and (touched or self._idle_s >= self._idle_exit_s):
            self._stop_process()
        else:
            self.start()
