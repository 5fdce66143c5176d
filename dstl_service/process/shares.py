"""
The rule by which jobs share a limit: threads, uploads, calls, room for bytes.

A job may hold at most `weight` times what stays free. So a job that takes all it can leaves a rest, the next one leaves
a part of that, and so on: with weight 1, each takes half of the rest. A part is reserved for newcomers, jobs that hold
nothing: whatever others do, the next job finds a place at once. No I/O, and no locks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """
    The rule by which jobs share a number of places or bytes.

    Invariants:
    1. While at most `kept` jobs hold something, and fewer than there are places, at least one place is free.
    2. A job that holds nothing gets what it asks for whenever that much is free: no request is refused for ever.

    Args:
        total: The limit.
        weight: A job may hold this many times what stays free; alone, it gets `weight / (weight + 1)` of the total.
        kept: Part reserved for jobs that hold nothing.
    """

    total: int
    weight: int
    kept: int

    def admits(self, held: int, more: int, free: int) -> bool:
        """Say whether a job that holds `held` may take `more` of the `free` rest."""
        left = free - more
        return left >= 0 if held <= 0 else left >= self.kept and held + more <= self.weight * left


def shares_of(total: int, weight: int = 1) -> Shares:
    """Return the rule for a limit: a quarter is reserved for jobs that hold nothing."""
    return Shares(total, weight, total // 4)


class SharedRoom:
    """
    Counts what each job holds of a limit. The names of jobs that hold nothing are not kept.

    Args:
        shares: The rule for the limit.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._held_by: Counter[str] = Counter()
        self.held = 0
        """What all jobs hold."""

    def held_by(self, job: str) -> int:
        """Return what a job holds."""
        return self._held_by.get(job, 0)

    def admits(self, job: str, more: int) -> bool:
        """Say whether a job may take this much more."""
        return self._shares.admits(self.held_by(job), more, self._shares.total - self.held)

    def take(self, job: str, more: int) -> bool:
        """Take this much for a job if it may have it, until `give_back`; say whether it was taken."""
        if not self.admits(job, more):
            return False
        self.held += more
        self._held_by[job] += more
        return True

    def give_back(self, job: str, less: int) -> None:
        """Give back what was taken, or a part of it."""
        self.held -= less
        self._held_by[job] -= less
        if not self._held_by[job]:
            del self._held_by[job]
