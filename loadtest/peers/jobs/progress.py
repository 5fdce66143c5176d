"""The progress of a peer's job: the rows that this process has made over time. Needs only Python's own library."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_ROWS = 1_000
_EVERY_S = 0.25


class Progress:
    """
    Appends the progress of this process to a file of its own.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        place = Path(folder) / "progress"
        place.mkdir(parents=True, exist_ok=True)
        self._path = place / f"{os.getpid()}-{time.time_ns()}.jsonl"
        self._rows = 0
        self._told = 0
        self._told_s = 0.0

    def add(self, rows: int = 1) -> None:
        """Count rows; tell about them four times a second."""
        self._rows += rows
        if self._rows - self._told >= _ROWS:
            now_s = time.time()
            if now_s - self._told_s >= _EVERY_S:
                self._tell(now_s)

    def end(self) -> None:
        """Tell about the last rows."""
        self._tell(time.time())

    def _tell(self, now_s: float) -> None:
        self._told, self._told_s = self._rows, now_s
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": now_s, "rows": self._rows}) + "\n")


def key_of(number: int, keys: int) -> int:
    """Return the key of an event; each key has the same number of any `keys` events in a row."""
    return number * 7919 % keys
