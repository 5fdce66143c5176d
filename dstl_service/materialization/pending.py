"""
What is known of a host's tables between a snapshot's announcement and the checkpoint that names it.

Plain values of `materializer`, which decides what happens to them. No I/O.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dstl_service.formats.keys import Place
from dstl_service.formats.under_way import Announcement
from dstl_service.materialization.policy import Schedule
from dstl_service.materialization.snapshot_folder import SnapshotFolder
from dstl_service.materialization.snapshot_uploader import KnownFiles
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import CheckpointRef
from storage.model import MaterializationHandle


@dataclass(frozen=True, slots=True)
class Offer:
    """
    What a restore tells its task.

    Args:
        materialize: Make a snapshot.
        report: What the driver has to learn of the table's snapshot: its announcement, or the handle of a stored one.
    """

    materialize: bool = False
    report: dict[str, Any] | None = None


@dataclass(slots=True)
class PendingSnapshot:
    """
    A table's snapshot on its way: announced, handed over and listed, in either order, then stored.

    Args:
        announcement: As which it is announced; with a new uid for each base, until a checkpoint lists it.
        since_ms: When it was begun.
        path: The folder that a task named.
        folder: The same, opened.
        listed_at: The checkpoint that was first seen to list it. Before, nothing of it may be put.
        storing: The upload.
        stored: Its handle, when all of it is there.
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

    def report(self, want: CheckpointRef) -> dict[str, Any] | None:
        """Return what the checkpoint after `want` is to be told."""
        if self.stored is not None:
            return self.stored.to_dict()
        is_for_next = self.listed_at is None and self.announcement.base == want
        return self.announcement.to_dict() if is_for_next else None


@dataclass(slots=True)
class ForeignSnapshot:
    """A listed snapshot of a table that another process announced: it may be at it, or dead."""

    uid: str
    since_ms: int
    looked_ms: int


class TableHistory(NamedTuple):
    """
    To which checkpoints what is known of a table belongs.

    Of a job that was deleted, or behind a rewind, ids come again: what was counted up to an id, or waits for one, tells
    nothing of those.
    """

    job_uid: str
    branch: int

    @classmethod
    def of(cls, job_store: JobStore, ref: CheckpointRef) -> TableHistory:
        """Return that of a checkpoint."""
        return cls(job_store.job_uid, Place.of(ref.id, ref.generation).branch)


@dataclass(slots=True)
class TrackedTable:
    """What is known of one table of this host."""

    history: TableHistory
    schedule: Schedule
    patience_ms: int
    """How long another process's snapshot is waited for; longer each time, or two hosts would undo each other's."""
    known: KnownFiles = field(default_factory=KnownFiles)
    own: PendingSnapshot | None = None
    foreign: ForeignSnapshot | None = None
    is_damaged: bool = False
    """A snapshot showed that its files on the local disk are not what was written."""
