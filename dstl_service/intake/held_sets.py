"""
Counts what a service holds of change sets: bytes in flight, and the sets themselves, of each job and of all.

Until its checkpoint is complete a set takes about a kilobyte beside its payload, durable or not. So the number of sets
is bounded like their bytes: empty ones would fill the memory otherwise. No I/O.
"""

from __future__ import annotations

from dstl_service.process.shares import shares_of
from dstl_service.wire import REFS_MAX
from storage.errors import OverloadedError

SETS_MAX = 4 * REFS_MAX
"""Sets of all jobs, about 400 MB. A job alone may hold half of them, twice as many as a checkpoint may name."""


class HeldSets:
    """
    What is held of one job, as a part of what is held of all: one call changes both, so they cannot differ.

    Args:
        total: What is held of all jobs; None for that itself.
    """

    def __init__(self, total: HeldSets | None = None) -> None:
        self._total = total
        self.in_flight_bytes = 0
        self.sets = 0

    def add_bytes(self, size_bytes: int) -> None:
        """Add bytes in flight, or take them off if negative."""
        self.in_flight_bytes += size_bytes
        if self._total is not None:
            self._total.add_bytes(size_bytes)

    def add_sets(self, sets: int) -> None:
        """Add sets, or take them off if negative."""
        self.sets += sets
        if self._total is not None:
            self._total.add_sets(sets)

    def check_room(self, job: str, sets: int = 1) -> None:
        """Raise `OverloadedError` if a job may not hold this many more sets before it completes checkpoints."""
        in_all = self.sets if self._total is None else self._total.sets
        if not shares_of(SETS_MAX).admits(self.sets, sets, SETS_MAX - in_all):
            raise OverloadedError(
                f"{self.sets} change sets of job {job!r} are held here, and {in_all} of all jobs; send the change set "
                "again when a checkpoint is complete",
                job=job,
            )
