"""
Decides when an upload gets an early second attempt. Pure: no I/O and no clock.

The latencies of an object store have a long tail, and a second request for the same object is seldom slow as well. An
attempt that takes longer than nine in ten of its size did lately is therefore joined by another one, long before it
counts as late. How long that is differs between stores and sizes, so it is measured while uploads go on.

Invariants:

1. Early attempts never exceed `share_max` times the number of uploads, plus `BURST`. So a store that slows down as a
   whole gets that much more load and no more; late attempts are then left to the retry policy.
2. No early attempt starts before `DELAY_MS_MIN`, nor before `SAMPLES_MIN` attempts of its size were measured.
"""

from __future__ import annotations

from collections import defaultdict, deque

SAMPLES = 256
"""Newest durations of a size class that count; at one upload a second these are four minutes."""
SAMPLES_MIN = 32
"""Fewer durations than these say nothing about the slowest tenth."""
QUANTILE = 0.9
DELAY_MS_MIN = 20.0
"""A store that answers faster gains nothing that a checkpoint would notice."""
BURST = 20.0
"""Early attempts that may follow each other without an upload in between."""
_RENEWED_AFTER = 8
_SMALLEST_CLASS_BITS, _BITS_PER_CLASS = 16, 4


def size_class(size_bytes: int) -> int:
    """Return the number of an object's class of sizes: 0 up to 64 KiB, then one for each factor of 16."""
    bits_above = max(size_bytes - 1, 0).bit_length() - _SMALLEST_CLASS_BITS
    return max(0, -(-bits_above // _BITS_PER_CLASS))


class Durations:
    """The newest durations of one size class, and their `QUANTILE`."""

    def __init__(self) -> None:
        self._newest_ms: deque[float] = deque(maxlen=SAMPLES)
        self._unsorted = 0
        self._quantile_ms: float | None = None

    def add(self, duration_ms: float) -> None:
        """Add a duration."""
        self._newest_ms.append(duration_ms)
        self._unsorted += 1

    def quantile_ms(self) -> float | None:
        """Return the quantile, at most `_RENEWED_AFTER` durations old; None below `SAMPLES_MIN`."""
        if len(self._newest_ms) < SAMPLES_MIN:
            return None
        if self._quantile_ms is None or self._unsorted >= _RENEWED_AFTER:
            self._quantile_ms = sorted(self._newest_ms)[int(QUANTILE * len(self._newest_ms))]
            self._unsorted = 0
        return self._quantile_ms


class Hedging:
    """
    The early attempts of one uploader.

    Args:
        share_max: Early attempts per upload, at most, in [0, 1]; with 0 there are none.
    """

    def __init__(self, share_max: float) -> None:
        self._share_max = share_max
        self._credit = 1.0 if share_max > 0 else 0.0
        self._durations: defaultdict[int, Durations] = defaultdict(Durations)

    def upload_begins(self) -> None:
        """Count one more upload."""
        self._credit = min(BURST, self._credit + self._share_max)

    def attempt_ended(self, size_bytes: int, duration_ms: float) -> None:
        """Take the duration of an attempt that stored an object of this size, whether it was the first to or not."""
        self._durations[size_class(size_bytes)].add(duration_ms)

    def delay_ms(self, size_bytes: int) -> float | None:
        """Return how long an attempt for this many bytes runs alone; None if nothing is known, or none may join it."""
        quantile_ms = self._durations[size_class(size_bytes)].quantile_ms() if self._share_max > 0 else None
        return None if quantile_ms is None else max(quantile_ms, DELAY_MS_MIN)

    def take(self) -> bool:
        """Return whether an early attempt may start now, and count it."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True
