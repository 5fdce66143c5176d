"""
What one job may have of what all jobs share: threads, uploads, calls, room for bytes.

A job may hold at most `weight` times what stays free beside it. So the first one that takes all it can get leaves some,
the second one leaves some of that, and so on: with a weight of 1, each takes half of what is left. And a part is kept
for newcomers, jobs that hold nothing: whatever others do, the next job finds a place at once. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """
    The rule by which jobs share a number of places, or of bytes.

    Invariants:
    1. As long as at most `kept` jobs hold something, and fewer than there are places, one place is free.
    2. A job that holds nothing gets what it asks for whenever that is free: nothing is refused for ever.

    Args:
        total: All there is.
        weight: How many times what stays free one job may hold: alone, it gets `weight / (weight + 1)` of all.
        kept: What is kept for jobs that hold nothing.
    """

    total: int
    weight: int
    kept: int

    def admits(self, held: int, more: int, free: int) -> bool:
        """Say whether a job that holds so much may take so much more of what is free."""
        left = free - more
        return left >= 0 if held <= 0 else left >= self.kept and held + more <= self.weight * left

    @property
    def alone_max(self) -> int:
        """The most that a job holds which takes one by one and has all to itself; at least 1."""
        return max(1, min(self.weight * self.total // (self.weight + 1), self.total - self.kept))


def shares_of(total: int, weight: int = 1) -> Shares:
    """Return the rule for a limit: a quarter is kept for jobs that hold nothing."""
    return Shares(total, weight, total // 4)
