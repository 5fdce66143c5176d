"""
Decides what a follower does next: which copies it brings forward, which ones have no room, when it rests and ends.

No I/O. Times are in seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from backend_client.standby.orders import StandbyStatus, TableName, id_of
from dstl_service.wire import CheckpointRef

EVERY_S = 1.0
"""Copies are brought forward this often at most: one step for several checkpoints is cheaper than one for each."""
BUSY_SHARE = 0.2
"""Share of time for which copies are brought forward at most, for the sake of the batches on their host."""
SILENCE_S_MAX = 20.0
"""A follower ends if the sidecar does not answer for this long; a task starts it again."""
NO_ROOM_S = 600.0
"""A copy for which there is no room is tried again after this time: others may have made room."""
_FREE_SHARE = 0.1
"""Share of a disk that stays free of copies."""
_TIGHT_SHARE = 0.05
"""If less is free, copies are given up."""


@dataclass(frozen=True, slots=True)
class Copy:
    """
    A complete copy.

    Args:
        checkpoint_id: The checkpoint at which it stands.
        size_bytes: Its size.
        branch: The branch of that checkpoint.
    """

    checkpoint_id: int
    size_bytes: int
    branch: int = 0

    def is_of(self, base: CheckpointRef) -> bool:
        """Return whether it may lead to `base`, or be past it; else a rewind has given its checkpoint up."""
        return self.branch >= base.branch or self.checkpoint_id < base.id


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk's size and free bytes."""

    total_bytes: int
    free_bytes: int


def in_turn(tables: Iterable[TableName], copies: Mapping[TableName, Copy]) -> list[TableName]:
    """
    Return the tables in the order of a round: complete copies, the oldest first, then those that are missing.

    A round makes one of these at most: that takes long, and the others must not fall behind by more than one such time.
    """
    wanted = list(tables)
    complete = sorted((name for name in wanted if name in copies), key=lambda name: copies[name].checkpoint_id)
    return [*complete, *(name for name in wanted if name not in copies)]


def has_room(size_bytes: int, copies: Iterable[Copy], disk: Disk, bytes_max: int) -> bool:
    """
    Say whether another copy may be made.

    Args:
        size_bytes: Its size in the storage; while it is made it takes up to twice as much.
        copies: The copies that are there.
        disk: The disk.
        bytes_max: The limit of all copies; 0 for none.
    """
    if bytes_max and sum(copy.size_bytes for copy in copies) + size_bytes > bytes_max:
        return False
    return disk.free_bytes - 2 * size_bytes >= _FREE_SHARE * disk.total_bytes


def to_give_up(copies: Mapping[TableName, Copy], disk: Disk, bytes_max: int) -> TableName | None:
    """Return the copy to give up because copies have grown beyond the limit or the disk is nearly full: the largest."""
    is_over = bytes_max and sum(copy.size_bytes for copy in copies.values()) > bytes_max
    if not copies or not (is_over or disk.free_bytes < _TIGHT_SHARE * disk.total_bytes):
        return None
    return max(copies, key=lambda name: copies[name].size_bytes)


def is_behind(version: CheckpointRef, base: CheckpointRef) -> bool:
    """
    Say whether a table may be brought to a checkpoint.

    A table that a task has used may be past the checkpoint, or on a later branch if the order is from before a rewind:
    to go back, it would be restored from the storage.

    Args:
        version: Where the table stands.
        base: The checkpoint.
    """
    return (version.branch, version.id) < (base.branch, base.id)


def rest_s(worked_s: float) -> float:
    """Return how long to rest after steps that took this long together; making a whole copy does not count."""
    return max(EVERY_S, worked_s * (1 / BUSY_SHARE - 1))


def status_of(tables: Sequence[TableName], copies: Mapping[TableName, Copy], read_bytes: int) -> StandbyStatus:
    """Return the status to be told of the tables that are wanted now."""
    complete = [copies[name] for name in tables if name in copies]
    return StandbyStatus(
        tables=len(complete),
        missing=len(tables) - len(complete),
        oldest_id=min((copy.checkpoint_id for copy in complete), default=-1),
        size_bytes=sum(copy.size_bytes for copy in complete),
        read_bytes=read_bytes,
        tables_id=id_of(tables),
    )
