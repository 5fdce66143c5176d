"""
How this process treats memory: what it has freed, and what it never frees.

Change sets come and go by the megabyte. The C library would give each large buffer back to the system and ask for a new
one, and the first touch of every page of that costs several times more than copying the bytes into it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

_LARGE_BYTES = 32 * 1024 * 1024
"""Larger buffers, which are rare, still go back at once; glibc takes no higher limit."""

_KEPT_BYTES = 64 * 1024 * 1024
"""At most so much free memory is kept at the end of the heap."""


class _Collector:
    """The garbage collector of this process, which is off while anybody wants it to be."""

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


_collector = _Collector()


def without_collections() -> AbstractContextManager[None]:
    """
    Have no garbage collected in this process meanwhile; for a second of work that makes many objects and no cycles.

    The collector would look through all of them again and again, and no other thread runs while it does.
    """
    return _collector.off()


def reuse_freed_memory() -> None:
    """Have buffers taken from memory that was freed before; does nothing where the C library is not glibc."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    set_option(_MMAP_THRESHOLD, _LARGE_BYTES)
    set_option(_TRIM_THRESHOLD, _KEPT_BYTES)


def freeze_heap() -> None:
    """
    Leave all that exists now out of the garbage collector's searches, each of which stops the process for a while.

    To be called once, when the program has been loaded.
    """
    gc.collect()
    gc.freeze()
