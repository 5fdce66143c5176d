"""
State of a host's tables between a snapshot's announcement and the checkpoint that names it.

Plain values of `tracked_table`, which decides about them. No I/O.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from dstl_service.formats.under_way import Announcement
from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.model import MaterializationHandle


@dataclass(frozen=True, slots=True)
class Offer:
    """
    The part of a restore's answer that concerns snapshots.

    Args:
        materialize: Whether the task is to make a snapshot.
        report: Report on the table's snapshot for the driver: its announcement, or the handle of a stored one.
    """

    materialize: bool = False
    report: dict[str, Any] | None = None


@dataclass(slots=True)
class PendingSnapshot:
    """
    A pending snapshot of a table: announced, then handed over and listed in either order, then stored.

    Args:
        announcement: Its announcement; with a new uid for each base, until a checkpoint lists it.
        since_ms: When it began.
        path: The folder that a task named.
        folder: The same, opened.
        listed_at: The checkpoint first seen to list it. Before that, no object of it may be put.
        storing: The upload.
        stored: Its handle once it is stored completely.
    """

    announcement: Announcement
    since_ms: int
    path: str | None = None
    folder: SnapshotFolder | None = None
    listed_at: CheckpointRef | None = None
    storing: asyncio.Task[None] | None = None
    stored: MaterializationHandle | None = None

    @property
    def uid(self) -> str:
        """The id under which it is announced."""
        return self.announcement.snapshot.uid

    def report(self, to_checkpoint: CheckpointRef) -> dict[str, Any] | None:
        """Return the report to the checkpoint after `to_checkpoint`, or None."""
        if self.stored is not None:
            return self.stored.to_dict()
        is_for_next = self.listed_at is None and self.announcement.base == to_checkpoint
        return self.announcement.to_dict() if is_for_next else None


@dataclass(slots=True)
class ForeignSnapshot:
    """A listed snapshot of a table that another process announced, which may be storing it or dead."""

    uid: str
    since_ms: int
    looked_ms: int


class TableHistory(NamedTuple):
    """
    The history that a table's state belongs to.

    Checkpoint ids repeat after a job's deletion or a rewind: counts up to an id, and waits for one, do not apply to
    another history.
    """

    job_uid: str
    branch: int

    @classmethod
    def of(cls, job_store: JobStore, ref: CheckpointRef) -> TableHistory:
        """Return a checkpoint's history."""
        return cls(job_store.job_uid, ref.branch)
