"""
Reads parts of restores ahead of their tables: while a table takes one part, the next ones are on their way.

A store answers a request after milliseconds, and sends through one connection only a part of what the host can take. So
a log of a thousand small objects, or a large file, is read by several requests at a time. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

PART_BYTES_MAX = 4 << 20
"""A larger part is read when its turn comes, so that memory stays bounded."""
PARTS_EACH = 8
"""Parts that one reader has under way."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part(Generic[_T]):
    """
    A part of a restore.

    Args:
        read: Reads it; blocks. Called once, possibly in another thread.
        size_bytes: How much memory it takes at most.
    """

    read: Callable[[], _T]
    size_bytes: int


class ReadAhead:
    """
    Threads that read parts for all restores of a process.

    A part that is under way, or waits to be taken, holds one of `parts_max` places. A reader that gets none reads in
    its own thread, so readers never wait for each other, and a reader may be called by a part of another one.

    Args:
        parts_max: Number of places, and of threads; 0 to read nothing ahead.
    """

    def __init__(self, parts_max: int) -> None:
        self._free = threading.Semaphore(parts_max)
        self._threads = ThreadPoolExecutor(max(1, parts_max), thread_name_prefix="ahead")  # threads start when needed

    def in_order(self, parts: Iterable[Part[_T]]) -> Iterator[_T]:
        """Yield the values of parts in their order; raises what reading a part raises when its turn comes."""
        left = iter(parts)
        begun: deque[Callable[[], _T] | Future[_T]] = deque()
        try:
            while True:
                while len(begun) < PARTS_EACH and (part := next(left, None)) is not None:
                    begun.append(self._begin(part))
                if not begun:
                    return
                yield self._value(begun.popleft())
        finally:
            for future in begun:
                if isinstance(future, Future):
                    future.add_done_callback(lambda _: self._free.release())

    def close(self) -> None:
        """Release the threads after their running calls; does not wait."""
        self._threads.shutdown(wait=False)

    def _begin(self, part: Part[_T]) -> Callable[[], _T] | Future[_T]:
        if part.size_bytes > PART_BYTES_MAX or not self._free.acquire(blocking=False):
            return part.read
        try:
            return self._threads.submit(part.read)
        except RuntimeError:  # closed, or the system is out of threads
            self._free.release()
            return part.read

    def _value(self, begun: Callable[[], _T] | Future[_T]) -> _T:
        if not isinstance(begun, Future):
            return begun()
        try:
            return begun.result()
        finally:
            self._free.release()


NOTHING_AHEAD = ReadAhead(0)
"""Reads every part when its turn comes, in the reader's thread."""
