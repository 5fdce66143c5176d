"""
The operator of the benchmark: a kilobyte per key that does not compress, and a count.

A host's environment names it (`HOST`), and a file (`FAILURE`): as soon as that exists, one task of the host fails.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

HOST, FAILURE = "DSTL_BENCH_HOST", "DSTL_BENCH_FAILURE"
EXIT = "exit"
"""The content of the file for which the worker ends; otherwise the function raises."""
OUTPUT = "k long, n long, partition int, host string"
_BLOB_BYTES = 1000


def blob(key: int, count: int) -> bytes:
    """Return the kilobyte of a key that was seen `count` times."""
    return hashlib.shake_128(f"{key} {count}".encode()).digest(_BLOB_BYTES)


class Blobs(StatefulProcessor):
    """Counts a key's rows, and rewrites its kilobyte each time."""

    def init(self, handle: Any) -> None:
        """Declare the state."""
        self._state = handle.getValueState("blob", "n long, blob binary")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: N802, N803
        """Begin with a count of 0."""
        self._state.update((0, blob(key[0], 0)))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803
        """Yield the key with its new count; raise if its kilobyte is not that of the old one."""
        partition = _partition()
        _fail_if_asked(partition)
        count, found = self._state.get() or (0, blob(key[0], 0))
        if bytes(found) != blob(key[0], count):
            raise RuntimeError(f"the state of key {key[0]} is damaged")
        count += sum(1 for _ in rows)
        self._state.update((count, blob(key[0], count)))
        yield Row(k=key[0], n=count, partition=partition, host=os.environ.get(HOST, ""))

    def close(self) -> None:
        """Do nothing."""


def _partition() -> int:
    context = TaskContext.get()
    return -1 if context is None else context.partitionId()


def _fail_if_asked(partition: int) -> None:
    """Fail if this host's file exists; its new name says which partition did."""
    file = os.environ.get(FAILURE, "")
    if not os.path.exists(file):
        return
    how = ""
    with suppress(FileNotFoundError):  # another task was first
        with open(file, encoding="utf-8") as asked:
            how = asked.read()
        os.rename(file, f"{file}-{partition}")
        if how == EXIT:
            os._exit(1)
        raise RuntimeError("this task fails on purpose")
