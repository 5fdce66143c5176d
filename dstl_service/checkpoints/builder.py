"""
What a checkpoint consists of: decided here alone, from its base, the request, and what replaces parts of the log.

A checkpoint's manifest is a complete one where something replaces a part of the log, or where one is due. Then all that
came before is in it: the base's state, truncated behind the snapshots that are taken in, with the compactions that fit.
What is being stored for later checkpoints, it lists. Its note says all that before its sets are durable, and the
manifest is made from the note. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dstl_service.formats.checkpoint_record import CheckpointRecord, note_of
from dstl_service.formats.manifest import Manifest, ManifestKind, StateView, is_complete_due
from dstl_service.formats.under_way import NOTHING, UnderWay, UnderWaySnapshot, followed
from dstl_service.materialization.admission import Reported
from dstl_service.restore.truncation import truncate
from dstl_service.wire import CheckpointRef, CompleteRequest
from storage.errors import ConflictError, InvalidInputError
from storage.model import Segment, SegmentHandle, Writer

Replace: TypeAlias = Callable[[StateView, UnderWay], tuple[StateView, tuple[str, ...]]]
"""Returns a view with compactions in it, and the uids of those that are under way; see `Maintenance.replace`."""


@dataclass(frozen=True, slots=True)
class Base:
    """
    What a checkpoint builds upon.

    Args:
        ref: The checkpoint before, or None for the first one.
        state: All that it consists of.
        under_way: What it lists.
    """

    ref: CheckpointRef | None = None
    state: StateView = field(default_factory=lambda: StateView((), []))
    under_way: UnderWay = NOTHING


@dataclass(frozen=True, slots=True)
class PlannedCheckpoint:
    """
    A checkpoint that is on its way.

    Args:
        id: Its id.
        request: What was asked for.
        note: What it is going to be.
        segment: The note, encoded.
        under_way: What it is going to list.
    """

    id: int
    request: CompleteRequest
    note: CheckpointRecord
    segment: Segment
    under_way: UnderWay

    def is_for(self, checkpoint_id: int, request: CompleteRequest) -> bool:
        """Say whether it is what this request asks for."""
        return (self.id, self.request) == (checkpoint_id, request)


@dataclass(frozen=True, slots=True)
class CheckpointBuilder:
    """
    Plans the checkpoints of one life of a job, and makes their manifests.

    Args:
        job: The job's name.
        job_uid: Of its life.
        max_parallelism: Number of its key groups.
    """

    job: str
    job_uid: str
    max_parallelism: int

    def plan(
        self, checkpoint_id: int, request: CompleteRequest, base: Base, reported: Reported, replace: Replace
    ) -> PlannedCheckpoint:
        """
        Decide what a checkpoint is going to be.

        Args:
            checkpoint_id: Its id.
            request: What is asked for.
            base: What `request.base` names.
            reported: What it makes of the snapshots that tasks reported.
            replace: Brings compactions in, behind the snapshots.
        """
        view, compactions = replace(truncate(base.state, reported.taken), base.under_way)
        is_complete = view is not base.state or is_complete_due(checkpoint_id)
        start = view if is_complete else None
        note = note_of(self.job, self.job_uid, self.max_parallelism, checkpoint_id, request, start)
        snapshots: tuple[UnderWaySnapshot, ...] = ()
        if base.ref is not None:
            snapshots = followed(
                base.under_way,
                base.ref,
                reported.announced,
                {*reported.refused, *(handle.uid for handle in reported.taken)},
                request.operators,
                view.materializations,
                self.max_parallelism,
            )
        return PlannedCheckpoint(checkpoint_id, request, note, note.to_segment(), UnderWay(snapshots, compactions))

    def manifest(
        self,
        planned: PlannedCheckpoint,
        handles: Sequence[SegmentHandle],
        of_note: Collection[SegmentHandle],
        created_ms: int,
    ) -> Manifest:
        """
        Return the manifest of a planned checkpoint whose sets are durable.

        Args:
            planned: What `plan` returned.
            handles: Of the sets, in the order of the request.
            of_note: That of the note.
            created_ms: When.
        """
        note = planned.note
        objects = {handle.object_key for handle in handles}
        return Manifest(
            kind=ManifestKind.DELTA if note.start is None else ManifestKind.COMPLETE,
            job_uid=self.job_uid,
            id=note.checkpoint_id,
            generation=0,
            uid=note.uid,
            epoch=note.epoch,
            created_ms=created_ms,
            base=note.base,
            query_id=note.query_id,
            offsets=note.offsets,
            operators=note.operators,
            segments=tuple(handles),
            earlier=() if note.start is None else tuple(note.start.log),
            materializations=() if note.start is None else note.start.materializations,
            note=next((handle for handle in of_note if handle.object_key not in objects), None),
            under_way=planned.under_way,
            closed_ms=note.closed_ms,
        )


def check_follows(checkpoint_id: int, base: CheckpointRef | None) -> None:
    """Refuse a checkpoint that does not stand right behind its base: a gap would lead around a fence there (I4)."""
    if checkpoint_id != (base.id + 1 if base is not None else 0):
        before = f"checkpoint {base.id}" if base is not None else "nothing"
        raise ConflictError(f"checkpoint {checkpoint_id} cannot follow {before}")


def check_writers(job: str, handles: Sequence[SegmentHandle], request: CompleteRequest, checkpoint_id: int) -> None:
    """
    Refuse a checkpoint that would name several writers for one partition (I2) or sets that are not its own.

    Where the batch was closed, another writer may have followed the first one. It knew which one that was, and how many
    sets that one had: its own are numbered behind them. So two attempts of one pass are never taken for both passes.
    """
    epoch, writers_max = request.epoch, 1 if request.closed_ms is None else 2
    writers: dict[tuple[str, int], dict[Writer, list[int]]] = {}
    if len({handle.entry.id for handle in handles}) != len(handles):
        raise InvalidInputError(f"checkpoint {checkpoint_id} names a change set twice")
    for handle in handles:
        set_id = handle.entry.id
        if (set_id.job, set_id.checkpoint_id, set_id.writer.epoch) != (job, checkpoint_id, epoch):
            raise InvalidInputError(
                f"change set {set_id} does not belong to job {job!r}, checkpoint {checkpoint_id}, epoch {epoch}"
            )
        of_partition = writers.setdefault((set_id.operator, set_id.partition), {})
        of_partition.setdefault(set_id.writer, []).append(set_id.sqn)
        if len(of_partition) > writers_max:
            raise InvalidInputError(
                f"checkpoint {checkpoint_id} names {len(of_partition)} writers for partition {set_id.partition} of "
                f"{set_id.operator!r}"
            )
    for (operator, partition), of_partition in writers.items():
        if len(of_partition) > 1 and not _follow_each_other(of_partition):
            raise InvalidInputError(
                f"checkpoint {checkpoint_id} names attempts {sorted(writer.attempt for writer in of_partition)} for "
                f"partition {partition} of {operator!r}, of which none goes on behind the other"
            )


def _follow_each_other(sqns: Mapping[Writer, Sequence[int]]) -> bool:
    """Say whether the sets of an epoch's writers, in the order of their attempts, are numbered through."""
    ordered = sorted(sqns, key=lambda writer: writer.attempt)
    numbers = [sqn for writer in ordered for sqn in sorted(sqns[writer])]
    return numbers == list(range(len(numbers)))
