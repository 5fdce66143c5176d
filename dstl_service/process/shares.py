"""
The rule by which jobs share a limit: threads, uploads, calls, room for bytes.

A job may hold at most `weight` times what stays free. So a job that takes all it can leaves a rest, the next one leaves
a part of that, and so on: with weight 1, each takes half of the rest. A part is reserved for newcomers, jobs that hold
nothing: whatever others do, the next job finds a place at once. No I/O.
"""

from __future__ import annotations

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
