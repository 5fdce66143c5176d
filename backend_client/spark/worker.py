"""
The Python worker process in which tasks run, one behind the other.

Spark collects garbage in it behind every task, and the next task waits for that. Whatever was imported is looked at
each time - some hundred thousand objects of libraries, more than a small batch takes altogether.
"""

from __future__ import annotations

import gc

_spared = False


def spare_garbage_collection() -> None:
    """Let later collections pass over all that is loaded by now; to be called behind a task, counts once."""
    global _spared  # noqa: PLW0603 - a fact about the process
    if not _spared:
        gc.collect()
        gc.freeze()
        _spared = True
