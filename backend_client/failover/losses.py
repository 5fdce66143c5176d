"""
The share of rows that a query may lose: a bound on each operator's rows within a window of time. No I/O.

A batch that would pass the bound is executed again and waits, so the bound holds for what checkpoints contain (I17).
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0


class LossWindow:
    """
    The rows of an operator's recent batches, run and lost.

    Args:
        fraction_max: Largest share of lost rows among all rows of the window, 0 to 1.
        window_s: Its length in seconds.
    """

    def __init__(self, fraction_max: float, window_s: float = WINDOW_S) -> None:
        self._fraction_max = fraction_max
        self._window_s = window_s
        self._batches: deque[tuple[float, int, int]] = deque()

    def allows(self, now_s: float, run: int, lost: int) -> bool:
        """Return whether a batch with these rows keeps the bound; without lost rows it always does."""
        if not lost:
            return True
        recent = [(rows, gone) for at, rows, gone in self._batches if at > now_s - self._window_s]
        gone = lost + sum(gone for _, gone in recent)
        return gone <= self._fraction_max * (run + gone + sum(rows for rows, _ in recent))

    def add(self, now_s: float, run: int, lost: int) -> None:
        """Count a batch whose checkpoint exists; `now_s` never decreases."""
        self._batches.append((now_s, run, lost))
        while self._batches[0][0] <= now_s - self._window_s:
            self._batches.popleft()
