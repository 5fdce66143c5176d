"""The operator of `bench_recovery`: a kilobyte per key that does not compress, and a count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

STATE = "k long, n long"
_BLOB_BYTES = 1000


def blob(key: int, count: int) -> bytes:
    """Return the kilobyte of a key that was seen so often."""
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
        count, found = self._state.get() or (0, blob(key[0], 0))
        if bytes(found) != blob(key[0], count):
            raise RuntimeError(f"the state of key {key[0]} is damaged")
        count += sum(1 for _ in rows)
        self._state.update((count, blob(key[0], count)))
        yield Row(k=key[0], n=count)

    def close(self) -> None:
        """Do nothing."""
