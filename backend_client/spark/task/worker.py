"""
The Python worker process in which tasks run, one behind the other, and how it collects garbage.

Spark collects garbage behind every task, and the next task waits for that. Whatever was imported is looked at each
time - some hundred thousand objects of libraries, more than a small batch takes altogether. And Python collects
whenever there are 700 objects more than before, which a batch's rows are many times over, though none is garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ROWS = 10_000
_spared = False


def spare_garbage_collection() -> None:
    """Let later collections pass over all that is loaded by now; to be called behind a task, counts once."""
    global _spared  # noqa: PLW0603 - a fact about the process
    if not _spared:
        gc.collect()
        gc.freeze()
        _spared = True


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Collect only where there are as many more objects as a batch of rows has; for functions that are given rows."""
    before = gc.get_threshold()
    if 0 < before[0] < _ROWS:
        gc.set_threshold(_ROWS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
