"""
Threads that jobs share: slow calls of some jobs leave threads to every other, see `shares`.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar, TypeVarTuple

from dstl_service.process.fair_slots import FairSlots

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

NO_JOB = ""
"""Stands for the service itself among the jobs."""


class RunInThread(Protocol):
    """Runs a job's blocking call in a thread, as `JobThreads.run` does."""

    async def __call__(self, job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Return what the function returns, or raise what it raises."""
        ...


class JobThreads:
    """
    Runs blocking calls of jobs; half of the threads are the most that one job has.

    Args:
        total: Threads in all.
        name: Of the threads.
    """

    def __init__(self, total: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(total, thread_name_prefix=name)
        self._slots = FairSlots(total)

    async def run(self, job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """
        Run a call in a thread, when it is this job's turn.

        Raises:
            RuntimeError: The call raised `StopIteration`, which no coroutine may.
        """
        await self._slots.acquire(job)
        try:
            call = asyncio.get_running_loop().run_in_executor(self._threads, _called, function, args)
        except BaseException:  # a system may have no thread left
            self._slots.release(job)
            raise
        # The place is the thread's: who waited for it may be gone long before it ends.
        call.add_done_callback(partial(self._ended, job))
        return await asyncio.shield(call)

    async def each(self, job: str, pieces: Iterator[_T]) -> AsyncIterator[_T]:
        """Yield what takes a thread to come by; between two pieces none is kept."""
        while taken := await self.run(job, lambda: list(islice(pieces, 1))):
            yield taken[0]

    def close(self) -> None:
        """Give the threads back when their calls have ended; begin no other."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, job: str, call: asyncio.Future[Any]) -> None:
        self._slots.release(job)
        if not call.cancelled():
            call.exception()  # nobody may be left to ask


def _called(function: Callable[[*_Args], _T], args: tuple[*_Args]) -> _T:
    try:
        return function(*args)
    except StopIteration as error:  # a future takes none: whoever waits would wait for ever
        raise RuntimeError(f"{function} found nothing where something was due") from error
