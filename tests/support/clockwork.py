"""The part of an event loop that watches use, whose time a test lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Clockwork:
    """Holds the functions that wait for their time."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        """Store the function until `pass_time`."""
        self.timers.append((delay_s, function))
        return None

    def pass_time(self, times: int = 1) -> None:
        """Let the time of what waits elapse, so often."""
        for _ in range(times):
            timers, self.timers = self.timers, []
            for _, function in timers:
                function()
