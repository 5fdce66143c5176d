"""Stops a process that nobody has asked anything for a while: the embedded sidecar goes away with its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class IdleWatch:
    """Calls `stop_process` after `idle_exit_s` seconds without a `touch`; 0 never does. Owned by the event loop."""

    def __init__(self, idle_exit_s: int, stop_process: Callable[[], None]) -> None:
        self._idle_exit_s = idle_exit_s
        self._stop_process = stop_process
        self._touched = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        if self._idle_exit_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._idle_exit_s, self._check)

    def touch(self) -> None:
        """Record a request; costs one assignment, so that it can be done for each."""
        self._touched = True

    def stop(self) -> None:
        """End the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if self._touched:
            self._touched = False
            self.start()
        else:
            self._stop_process()
