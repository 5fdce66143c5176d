"""
An event loop whose time advances only when nothing is left to do, and whose calls into threads are steps of a script.

Everything runs in one thread and in an order that the seed decides, so a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from functools import partial
from typing import Any

from storage.clock import Clock


class VirtualLoop(asyncio.SelectorEventLoop):
    """
    A loop with a time of its own.

    `call` replaces the executors: it gets the function that would run in a thread, and the future of its result.
    """

    def __init__(self, call: Callable[[Callable[[], Any], asyncio.Future[Any]], None]) -> None:
        self._now_s = 0.0
        self._call = call
        super().__init__(_Impatient(self))

    def time(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def pass_time(self, seconds: float | None) -> None:
        """Advance the time to the next timer."""
        if seconds is None:
            raise RuntimeError("everybody waits for somebody else")
        self._now_s += seconds

    def run_in_executor(  # type: ignore[override]  # called with one result type only
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Pass the call on."""
        future = self.create_future()
        self._call(partial(func, *args), future)
        return future


class LoopClock(Clock):
    """The loop's time, in the form that services expect."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def monotonic_ms(self) -> int:
        """Return the loop's time."""
        return int(self.loop.time() * 1000) if self.loop is not None else 0

    def now_ms(self) -> int:
        """Return a wall time that advances with the loop's."""
        return 1_700_000_000_000 + self.monotonic_ms()


class _Impatient(selectors.DefaultSelector):
    """Does not wait: time jumps instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """Return what is ready now."""
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._loop.pass_time(timeout)
        return ready
