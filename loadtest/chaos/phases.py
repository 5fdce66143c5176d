"""
The drivers' current requests, so that kills hit every kind of request.

Shared by the drivers' threads, which announce their requests, and the thread that kills.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

KINDS = (
    "open",
    "begin",
    "append",
    "append preemptive",
    "flush",
    "persist",
    "complete",
    "abort",
    "restore",
    "collect garbage",
    "rewind",
)
"""The kinds of requests."""


class Phases:
    """Counts requests by kind; `kills` counts how often the service was killed, `hangs` how often it hung."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self.kills = 0
        self.hangs = 0
        self.wanted: str | None = None
        """The kind that the killer waits for; drivers with a choice send that."""

    @contextmanager
    def request(self, kind: str) -> Iterator[None]:
        """Announce a running request of this kind."""
        with self._condition:
            self._running[kind] += 1
            self._begun[kind] += 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._running[kind] -= 1

    def wait_for_next(self, kind: str, count: int, timeout_s: float) -> bool:
        """Wait until `count` more requests of a kind have begun; return whether they have."""
        with self._condition:
            self.wanted = kind
            goal = self._begun[kind] + count
            reached = self._condition.wait_for(lambda: self._begun[kind] >= goal, timeout_s)
            self.wanted = None
            return reached

    def running(self) -> list[str]:
        """Return the kinds of the requests that run now."""
        with self._condition:
            return sorted(kind for kind, count in self._running.items() if count > 0)
