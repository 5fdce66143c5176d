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
from functools import partial
from typing import Generic, NamedTuple, TypeVar

PART_BYTES_MAX = 4 << 20
"""A larger part is read when its turn comes, so that memory stays bounded."""
PARTS_EACH = 8
"""Large parts that one reader has under way."""
SMALL_EACH = 4 * PARTS_EACH
"""Small parts, of up to a quarter of `PART_BYTES_MAX`, that one reader has under way: the storage's latency decides how
long they take, not their size."""
_QUARTERS = SMALL_EACH // PARTS_EACH

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Part(Generic[_T]):
    """
    A part of a restore.

    Args:
        read: Reads it; blocks. Called once, possibly in another thread.
        size_bytes: How much memory it takes at most. A part of 0 bytes is in memory already: its reader reads it, since
            a thread would cost more, and the reader may be the event loop.
    """

    read: Callable[[], _T]
    size_bytes: int


class ReadAhead:
    """
    Threads that read parts for all restores of a process.

    A part that is under way, or waits to be taken, holds one to four quarters of `parts_max` places, by its size. A
    reader that gets none reads in its own thread, so readers never wait for each other, and a reader may be called by
    a part of another one.

    Args:
        parts_max: Number of places, of `PART_BYTES_MAX` each; there are four threads for each. 0 reads nothing ahead.
    """

    def __init__(self, parts_max: int) -> None:
        self._lock = threading.Lock()
        self._free = _QUARTERS * parts_max
        self._threads = ThreadPoolExecutor(max(1, self._free), thread_name_prefix="ahead")  # threads start when needed

    def in_order(self, parts: Iterable[Part[_T]]) -> Iterator[_T]:
        """Yield the values of parts in their order; raises what reading a part raises when its turn comes."""
        left = iter(parts)
        begun: deque[_Begun[_T]] = deque()
        held = 0
        try:
            while True:
                while held < SMALL_EACH and (part := next(left, None)) is not None:
                    begun.append(self._begin(part))
                    held += begun[-1].quarters
                if not begun:
                    return
                taken = begun.popleft()
                held -= taken.quarters
                yield self._value(taken)
        finally:
            for one in begun:
                if isinstance(one.value, Future):
                    one.value.add_done_callback(partial(self._release, one.quarters))

    def close(self) -> None:
        """Release the threads after their running calls; does not wait."""
        self._threads.shutdown(wait=False)

    def _begin(self, part: Part[_T]) -> _Begun[_T]:
        quarters = min(_QUARTERS, 1 + _QUARTERS * part.size_bytes // (PART_BYTES_MAX + 1))
        if not 0 < part.size_bytes <= PART_BYTES_MAX or not self._take(quarters):
            return _Begun(part.read, quarters)
        try:
            return _Begun(self._threads.submit(part.read), quarters)
        except RuntimeError:  # closed, or the system is out of threads
            self._release(quarters)
            return _Begun(part.read, quarters)

    def _value(self, begun: _Begun[_T]) -> _T:
        if not isinstance(begun.value, Future):
            return begun.value()
        try:
            return begun.value.result()
        finally:
            self._release(begun.quarters)

    def _take(self, quarters: int) -> bool:
        with self._lock:
            fits = quarters <= self._free
            self._free -= quarters if fits else 0
            return fits

    def _release(self, quarters: int, _: object = None) -> None:
        with self._lock:
            self._free += quarters


class _Begun(NamedTuple, Generic[_T]):
    """A part that is under way, or the function that reads it in its turn, and its quarters of a place."""

    value: Callable[[], _T] | Future[_T]
    quarters: int


NOTHING_AHEAD = ReadAhead(0)
"""Reads every part when its turn comes, in the reader's thread."""
