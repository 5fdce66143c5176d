"""
Tuning of the allocator and the garbage collector of this process.

Change sets are buffers of megabytes that live briefly. By default, glibc returns each large buffer to the system and
maps a new one, and the page faults of a new buffer cost several times more than copying the bytes into it. Buffers that
are kept instead are kept by each arena, of which glibc makes eight per core: as many as there are threads, here.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8

_LARGE_BYTES = 32 * 1024 * 1024
"""Larger buffers, which are rare, are still unmapped at once; glibc accepts no higher limit."""

_KEPT_BYTES = 64 * 1024 * 1024
"""Most free memory kept at the end of each arena."""

_ARENAS = 4
"""Threads seldom allocate at the same time: they wait for the store, or for the interpreter's lock."""


class _Collector:
    """The garbage collector of this process; disabled while at least one `off` context is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted_off = 0
        self._was_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._wanted_off:
                self._was_on = gc.isenabled()
            self._wanted_off += 1
            gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._wanted_off -= 1
                if not self._wanted_off and self._was_on:
                    gc.enable()


without_collections = _Collector().off
"""
Disables garbage collection within this context; for about a second of work that makes many objects without cycles.

The collector would traverse all of them repeatedly, and no other thread runs meanwhile.
"""


def reuse_freed_memory() -> None:
    """Make the allocator reuse freed memory for large buffers; no effect if the C library is not glibc."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
    set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
    set_option(_ARENA_MAX, _ARENAS)


def freeze_heap() -> None:
    """
    Exclude all present objects from garbage collection, each run of which pauses the process.

    Call once, after the program was loaded.
    """
    gc.collect()
    gc.freeze()
