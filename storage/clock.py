"""
The only access to time, randomness and unique ids. All other code takes a `Clock` or an `IdSource` as an argument.

Both system implementations may be used by any number of threads, and after a fork.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Protocol

_COUNTER_MAX = 0xFFF
_VARIANT = 0b10 << 62
_RANDOM_BITS = 62


class Clock(Protocol):
    """A source of time, in milliseconds."""

    def now_ms(self) -> int:
        """Return the time since 1970-01-01 UTC. May jump, also backwards; compare it only with stored times."""

    def monotonic_ms(self) -> int:
        """Return a time that never goes backwards, from an arbitrary start. For delays and timeouts."""


class IdSource(Protocol):
    """A source of ids that are unique over all processes and hosts."""

    def unique_id(self) -> str:
        """Return a new id of 32 characters of [0-9a-f]; ids of one source ascend, ids of all sources sort by time."""


def new_secret() -> str:
    """Return a text of 43 characters with 256 random bits, for a token; it cannot be foreseen, not even by a test."""
    return secrets.token_urlsafe(32)


class SystemClock:
    """The clock of this host."""

    def now_ms(self) -> int:
        """Return the host's wall time."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return the host's monotonic time."""
        return time.monotonic_ns() // 1_000_000


class SystemIds:
    """
    Ids laid out as UUID version 7 without the dashes.

    48 bits of time in ms · version 7 · 12 bits that count ids within one millisecond · variant 2 · 62 random bits.
    The time never goes back within one source, even if the clock does.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._last_ms = 0
        self._counter = 0

    def unique_id(self) -> str:
        """Return an id greater than all earlier ones of this source."""
        time_ms, counter = self._next_tick()
        return f"{time_ms:012x}7{counter:03x}{_VARIANT | secrets.randbits(_RANDOM_BITS):016x}"

    def _next_tick(self) -> tuple[int, int]:
        now_ms = self._clock.now_ms()
        with self._lock:
            if now_ms > self._last_ms:
                self._last_ms, self._counter = now_ms, 0
            elif self._counter < _COUNTER_MAX:
                self._counter += 1
            else:
                self._last_ms, self._counter = self._last_ms + 1, 0
            return self._last_ms, self._counter
