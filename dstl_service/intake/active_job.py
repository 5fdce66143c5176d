"""
A job in a service process: its known epoch, its change sets and its running work.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from dstl_service.intake.change_sets import ChangeSetTracker
from dstl_service.intake.deletion_look import DeletionLook
from dstl_service.intake.in_flight_limiter import InFlightLimiter
from dstl_service.intake.unknown_job import no_such_epoch
from dstl_service.registry.job_store import JobStore
from storage.errors import FencedError

logger = logging.getLogger("dstl_service")


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveJob:
    """One job in one service process, as the intake needs it; other parts key their own state by it."""

    name: str
    store: JobStore
    book: ChangeSetTracker
    room: InFlightLimiter
    used_ms: int = 0
    epoch: int = 0
    owned_epoch: int = 0
    """The newest epoch that was begun or completed a checkpoint here; with it, this service is the coordinator."""
    newest_id: int = -1
    turn: int = 0
    """Counts begins and aborts; a request from before one of them is not carried out after it."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    look: DeletionLook = field(default_factory=DeletionLook)
    """Background check whether the job was deleted before the newest checkpoint began."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_error: str | None = None
    timer: asyncio.TimerHandle | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when this is dropped."""
    needed_by: list[Callable[[], bool]] = field(default_factory=list)
    """Say whether work for the job runs, so that this is not dropped although the job is idle."""

    def wake(self) -> None:
        """Wake all waiters for sets or for room; later ones wait for the next change."""
        self.room.freed()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def is_of(self, job_uid: str) -> bool:
        """Say whether the job is known to have this uid; an empty uid matches every job."""
        return job_uid in ("", self.store.job_uid)

    def knows(self, epoch: int) -> bool:
        """Say whether this or a newer epoch is known to have begun."""
        return self.epoch > 0 and epoch <= self.epoch

    def check_epoch(self, epoch: int) -> None:
        """Check that this epoch owns the job, as known here; else `FencedError` (a newer one) or `NotFoundError`."""
        if epoch < self.epoch:
            raise FencedError.taken_over(self.name, epoch, self.epoch)
        if not self.knows(epoch):
            raise no_such_epoch(self.name, epoch)

    def learn_epoch(self, epoch: int) -> None:
        """Note an epoch that the store has; a caller's claim alone never fences a job (I4)."""
        if epoch > self.epoch:
            logger.info("newer epoch", extra={"job": self.name, "epoch": epoch, "older_epoch": self.epoch})
            # A new owner may continue from an earlier checkpoint.
            self.epoch, self.newest_id = epoch, -1
            self.look.forget_checkpoints()
            self.book.forget_epochs_before(epoch)
            self.wake()

    async def discard_attempt(self, checkpoint_id: int) -> None:
        """Drop the sets of this and earlier checkpoints; no earlier try at this one can complete any more."""
        self.turn += 1
        async with self.writing:  # waits until a manifest that is being written exists, or has failed
            self.book.forget_up_to(checkpoint_id)
            self.wake()
