"""
How this process treats memory: what it has freed, and what it never frees.

Change sets come and go by the megabyte. The C library would give each large buffer back to the system and ask for a new
one, and the first touch of every page of that costs several times more than copying the bytes into it.
"""

from __future__ import annotations

import ctypes
import gc

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

_LARGE_BYTES = 32 * 1024 * 1024
"""Larger buffers, which are rare, still go back at once; glibc takes no higher limit."""

_KEPT_BYTES = 64 * 1024 * 1024
"""At most so much free memory is kept at the end of the heap."""


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
