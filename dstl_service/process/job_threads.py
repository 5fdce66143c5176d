"""
Threads that jobs share: slow calls of some jobs leave threads for all others, see `shares`.

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
"""Job name for calls of the service itself."""


class RunInThread(Protocol):
    """Runs a job's blocking call in a thread, as `JobThreads.run` does."""

    async def __call__(self, job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Return what the function returns, or raise what it raises."""


class JobThreads:
    """
    Runs blocking calls of jobs; one job has at most half of the threads.

    Args:
        total: Number of threads.
        name: Prefix of the threads' names.
    """

    def __init__(self, total: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(total, thread_name_prefix=name)
        self._slots = FairSlots(total)

    async def run(self, job: str, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """
        Run a call in a thread when it is the job's turn; return or raise what the call does.

        Raises:
            RuntimeError: The call raised `StopIteration`, which a coroutine cannot raise.
        """
        await self._slots.acquire(job)
        try:
            call = asyncio.get_running_loop().run_in_executor(self._threads, _called, function, args)
        except BaseException:  # the system may be out of threads
            self._slots.release(job)
            raise
        # The slot belongs to the thread, which may outlive its cancelled caller.
        call.add_done_callback(partial(self._ended, job))
        return await asyncio.shield(call)

    async def each(self, job: str, pieces: Iterator[_T]) -> AsyncIterator[_T]:
        """Yield pieces, each computed in a thread; no thread is held between two pieces."""
        while taken := await self.run(job, lambda: list(islice(pieces, 1))):
            yield taken[0]

    def close(self) -> None:
        """Release the threads after their running calls; cancel queued ones. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, job: str, call: asyncio.Future[Any]) -> None:
        self._slots.release(job)
        if not call.cancelled():
            call.exception()  # marks it as retrieved: the caller may have been cancelled


def _called(function: Callable[[*_Args], _T], args: tuple[*_Args]) -> _T:
    try:
        return function(*args)
    except StopIteration as error:  # a future rejects it, so its waiter would hang for ever
        raise RuntimeError(f"{function} raised StopIteration, which a future cannot hold") from error
