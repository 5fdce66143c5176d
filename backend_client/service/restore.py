"""
Advances a table to the base; all content of a table comes this way.

It serves the normal case (the previous batch's change set, from the sidecar's memory), retries, speculative copies,
moves to another executor, cold starts and changed parallelism. An empty table first gets snapshots, if there are any: a
snapshot of exactly its key groups becomes the table; from others, its own key groups are copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

from backend_client.service.client import ServiceClient
from backend_client.service.deadline import Deadline
from backend_client.service.host_link import link_to_read
from backend_client.table.local_disk import LocalDiskError
from backend_client.table.memory_table import MemoryTable
from backend_client.table.snapshot import FileNotHereError, IncomingSnapshot
from backend_client.table.state_table import StateTable
from dstl_service.wire import (
    ChangeSetRef,
    CheckpointRef,
    EndFrame,
    ErrorFrame,
    FileFrame,
    GoneFrame,
    LinkAddress,
    PlanFrame,
    RestoreFrame,
    SegmentFrame,
    SetFrame,
    SnapshotFrame,
    read_frames,
)
from storage.change_set import ChangeColumns, decode_columns
from storage.checksum import checksum64
from storage.errors import CorruptDataError, UnavailableError
from storage.key_groups import KeyGroupRange

_KEY_GROUP = struct.Struct(">H")
_BROKEN_STREAMS_MAX = 2
_BYTES_PER_S = 200 << 20
"""No restore is faster."""
_FULL_BYTES_PER_S = 100 << 20
"""No restore of a whole table is faster that shares its host with batches."""

Frames: TypeAlias = Iterator[tuple[RestoreFrame, bytes]]
Changes: TypeAlias = Iterable[ChangeColumns]


@dataclass(frozen=True, slots=True)
class Advance:
    """
    The result of advancing a table.

    Args:
        changes: Number of applied changes of the log.
        materialize: Whether the sidecar requests a snapshot of the table now.
        materialized: Report of the table's snapshot for the driver: its announcement, or a stored one's handle.
    """

    changes: int
    materialize: bool = False
    materialized: dict[str, Any] | None = None


class SlowRestoreError(Exception):
    """A table cannot be brought to its base within the time that its task waits for it."""


class _GoneError(Exception):
    """The table is so old that the changes from it to the base are no longer stored."""


def advance_to_base(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    base: CheckpointRef | None,
    until: Deadline | None = None,
) -> Advance:
    """
    Advance the table to checkpoint `base` (None: before the first).

    Args:
        table: The table.
        client: The sidecar's client.
        job: Name of the job.
        operator: The table's operator.
        key_groups: Its key groups.
        base: The checkpoint.
        until: When it is given up, earlier if it cannot succeed; None: as long as it takes. A table in memory, where
            the local disk fails, is waited for: a restore beside the batches would not last.

    Raises:
        SlowRestoreError: It took longer, or would. The table has no version then.
        CorruptDataError: Stored state is damaged; names the object. The table keeps none of it under a version.
        UnavailableError: The sidecar or its store does not answer.
        LocalDiskError: The table's folder cannot be used; a retry there would fail, too.
    """
    if base is None:
        # Any content belongs to no checkpoint of this job.
        table.clear()
        return Advance(0)
    if until is not None and not isinstance(table, MemoryTable):
        try:
            return _advance(table, client, job, operator, key_groups, base.to_text(), until)
        except LocalDiskError:
            raise  # a restore beside the batches would leave nothing on this disk either
        except UnavailableError as error:
            raise SlowRestoreError(f"the sidecar did not answer in time: {error}") from error
    for _ in range(_BROKEN_STREAMS_MAX):
        try:
            return _advance(table, client, job, operator, key_groups, base.to_text())
        except LocalDiskError:
            raise
        except UnavailableError:
            continue
    return _advance(table, client, job, operator, key_groups, base.to_text())


def read_change_sets(
    client: ServiceClient, job: str, epoch: int, refs: Sequence[ChangeSetRef], links: LinkAddress | None = None
) -> Changes:
    """
    Yield change sets of a checkpoint that does not exist yet, in order; memory holds one at a time.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        epoch: The driver's epoch.
        refs: The change sets.
        links: Where the coordinator accepts links, which reaches what other hosts took in; None if it does not.

    Raises:
        LostChangesError: A change set is lost; the batch must be executed again.
        UnavailableError: The sidecar or its store does not answer.
    """
    link_to_read(client, job, links, refs)
    done = broken = 0
    while done < len(refs):
        try:
            with client.read(job, epoch, refs[done:]) as frames:
                for frame, payload in read_frames(frames):
                    if isinstance(frame, ErrorFrame):
                        raise frame.exception
                    if isinstance(frame, SetFrame):
                        yield decoded_segment(frame, payload)
                        done += 1
            if done < len(refs):
                raise CorruptDataError(f"{len(refs) - done} change sets are missing in the sidecar's answer")
        except UnavailableError:
            broken += 1
            if broken > _BROKEN_STREAMS_MAX:
                raise


def _advance(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    to_checkpoint: str,
    until: Deadline | None = None,
) -> Advance:
    """Try once. If the sidecar dies, the stream breaks; the table's version tells where to resume."""
    from_checkpoint = table.version
    if from_checkpoint == to_checkpoint:
        return Advance(0)
    try:
        return _apply(table, client, job, operator, key_groups, from_checkpoint, to_checkpoint, until)
    except FileNotHereError:
        client.takes_files = False
    except _GoneError:
        pass
    table.clear()
    return _apply(table, client, job, operator, key_groups, None, to_checkpoint, until)


def _apply(
    table: StateTable,
    client: ServiceClient,
    job: str,
    operator: str,
    key_groups: KeyGroupRange,
    from_checkpoint: str | None,
    to_checkpoint: str,
    until: Deadline | None,
) -> Advance:
    restore = client.restore if until is None else partial(client.restore, patience_s=max(0.0, until.left_s))
    with restore(job, operator, key_groups, from_checkpoint, to_checkpoint) as stream:
        frames = read_frames(stream) if until is None else _in_time(read_frames(stream), until)
        plan, _ = next(frames)
        if not isinstance(plan, PlanFrame):
            raise unexpected_frame(plan)
        if plan.is_full:
            table.clear()
        for _ in range(plan.snapshots):
            _take_snapshot(table, frames, key_groups if plan.snapshots == 1 else None)
        changes = table.advance_columns(_changes(frames), to_checkpoint)
        return Advance(changes, plan.materialize, plan.materialized)


def _in_time(frames: Frames, until: Deadline) -> Frames:
    """
    Yield the frames while there is hope that they end in time.

    A table that lacks a few checkpoints only is not given up halfway: all of it would have to be restored then.
    """
    is_full = True
    for frame, payload in frames:
        if isinstance(frame, PlanFrame):
            is_full = frame.is_full
            if max(0.0, until.left_s) < frame.size_bytes / (_FULL_BYTES_PER_S if is_full else _BYTES_PER_S):
                raise SlowRestoreError(f"{frame.size_bytes} bytes take longer than the task waits")
        elif is_full and until.left_s < 0 and not isinstance(frame, EndFrame):
            raise SlowRestoreError("the restore takes longer than the task waits")
        yield frame, payload


def _take_snapshot(table: StateTable, frames: Frames, adopted: KeyGroupRange | None) -> None:
    """Make the next snapshot the table, if it has exactly these key groups; else copy what counts of it."""
    frame, _ = next(frames)
    if not isinstance(frame, SnapshotFrame):
        raise unexpected_frame(frame)
    with table.receiving(frame.index_key, frame.version) as incoming:
        _receive(incoming, frame, frames)
        if frame.key_groups == adopted and frame.counted == (adopted,):
            table.adopt(incoming)
        else:
            for part in frame.counted:
                table.copy(_of_snapshot(incoming, part))


def _changes(frames: Frames) -> Changes:
    for frame, payload in frames:
        match frame:
            case EndFrame():
                return
            case GoneFrame():
                raise _GoneError
            case SegmentFrame():
                yield from _segment(frame, payload)
            case _:
                raise unexpected_frame(frame)


def _receive(incoming: IncomingSnapshot, snapshot: SnapshotFrame, frames: Frames) -> None:
    while incoming.files < snapshot.files:
        piece, payload = next(frames)
        if not isinstance(piece, FileFrame):
            raise unexpected_frame(piece)
        incoming.take(piece, payload)


def _of_snapshot(incoming: IncomingSnapshot, key_groups: KeyGroupRange) -> Iterator[tuple[bytes, bytes]]:
    end = _KEY_GROUP.pack(key_groups.last + 1)
    return takewhile(lambda item: item[0] < end, incoming.items(_KEY_GROUP.pack(key_groups.first)))


def _segment(frame: SegmentFrame, payload: bytes) -> Changes:
    changes = decoded_segment(frame, payload)
    if frame.counted == (frame.key_groups,):
        return [changes]
    return map(changes.of_key_groups, frame.counted)


def decoded_segment(frame: SetFrame, payload: bytes) -> ChangeColumns:
    """Return a frame's changes; `CorruptDataError` if they were damaged."""
    source = frame.source
    if f"{checksum64(payload):016x}" != frame.checksum:
        raise CorruptDataError(f"a segment of object {source} was damaged in transfer", object_key=source)
    return decode_columns(payload, source)


def unexpected_frame(frame: RestoreFrame) -> Exception:
    """Return the error that the service reported, or one for an unexpected frame."""
    if isinstance(frame, ErrorFrame):
        return frame.exception
    return CorruptDataError(f"unexpected frame {frame.KIND!r} in a restore stream")
