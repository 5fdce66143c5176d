"""
Garbage collection in the Python worker process, which runs tasks one after another.

Spark collects garbage after every task, and the next task waits for it. Each collection traverses everything that was
imported - some hundred thousand objects of libraries, which takes longer than a whole small batch. And Python collects
whenever 700 objects were added, which happens many times during a batch's rows, though none of them is garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ROWS = 10_000
_spared = False


def spare_garbage_collection() -> None:
    """Exempt all objects loaded so far from later collections; to be called after a task, acts once per process."""
    global _spared  # noqa: PLW0603 - a fact about the process
    if not _spared:
        gc.collect()
        gc.freeze()
        _spared = True


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect only after as many new objects as a batch of rows has; for functions that get rows."""
    before = gc.get_threshold()
    if 0 < before[0] < _ROWS:
        gc.set_threshold(_ROWS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
