"""
Decides the content of a checkpoint, from its base, the request, and the replacements for parts of the log.

A checkpoint's manifest is complete if something replaces a part of the log, or if a complete one is due. It then
contains all earlier state: the base's, truncated at the snapshots that it takes, with the compactions that fit. It also
lists what is being stored for later checkpoints. Its record states all that before its sets are durable, and the
manifest is built from the record. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dstl_service.formats.checkpoint_header import header_of
from dstl_service.formats.checkpoint_record import CheckpointRecord, record_of
from dstl_service.formats.manifest import Manifest, ManifestKind, StateView, is_complete_due
from dstl_service.formats.under_way import NOTHING, UnderWay, UnderWaySnapshot, followed
from dstl_service.materialization.admission import Reported
from dstl_service.restore.truncation import truncate, without_consumed
from dstl_service.wire import CheckpointRef, CompleteRequest, ForkOrigin
from storage.errors import ConflictError, InvalidInputError
from storage.model import Segment, SegmentHandle, Writer

TEXT_CHARS_MAX = 4 << 20
"""Most characters of the offsets and states of a checkpoint. A Kafka source needs about 25 for each partition."""

_STATE_CHARS = 100
"""What a state counts as beside its texts: it takes memory in each checkpoint that is listed."""

Replace: TypeAlias = Callable[[StateView, UnderWay], tuple[StateView, tuple[str, ...]]]
"""Returns a view with compactions applied, and the uids of those under way; see `JobMaintenance.replace`."""


@dataclass(frozen=True, slots=True)
class Base:
    """
    The base of a checkpoint.

    Args:
        ref: The checkpoint before, or None for the first one.
        state: Its state.
        under_way: Its under-way list.
    """

    ref: CheckpointRef | None = None
    state: StateView = field(default_factory=lambda: StateView((), []))
    under_way: UnderWay = NOTHING


@dataclass(frozen=True, slots=True)
class PlannedCheckpoint:
    """
    A checkpoint that is not complete yet.

    Args:
        request: The request to complete it.
        record: Its content.
        note: The segment that stores the record.
        under_way: Its under-way list.
    """

    request: CompleteRequest
    record: CheckpointRecord
    note: Segment
    under_way: UnderWay

    def is_for(self, checkpoint_id: int, request: CompleteRequest) -> bool:
        """Return whether it is the answer to this request."""
        return (self.record.checkpoint_id, self.request) == (checkpoint_id, request)


@dataclass(frozen=True, slots=True)
class CheckpointBuilder:
    """
    Plans the checkpoints of one life of a job, and builds their manifests.

    Args:
        job: The job's name.
        job_uid: Uid of its life.
        max_parallelism: Number of its key groups.
        origin: Where it began, if it is a fork.
    """

    job: str
    job_uid: str
    max_parallelism: int
    origin: ForkOrigin | None = None

    def plan(
        self,
        checkpoint_id: int,
        request: CompleteRequest,
        base: Base,
        reported: Reported,
        replace: Replace,
        planned_ms: int = 0,
    ) -> PlannedCheckpoint:
        """
        Decide the content of a checkpoint.

        Args:
            checkpoint_id: Its id.
            request: The request to complete it.
            base: The checkpoint that `request.base` names.
            reported: The snapshots that tasks reported: taken, announced and refused ones.
            replace: Applies compactions, after the snapshots.
            planned_ms: The coordinator's time.
        """
        view, compactions = replace(truncate(base.state, reported.taken), base.under_way)
        is_complete = view is not base.state or is_complete_due(checkpoint_id)
        start = without_consumed(view, request.operators) if is_complete else None
        life = self.job, self.job_uid, self.max_parallelism
        record = record_of(*life, checkpoint_id, request, start, self.origin, planned_ms)
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
        return PlannedCheckpoint(request, record, record.to_segment(), UnderWay(snapshots, compactions))

    def manifest(
        self,
        planned: PlannedCheckpoint,
        handles: Sequence[SegmentHandle],
        note: SegmentHandle | None,
        created_ms: int,
    ) -> Manifest:
        """
        Return the manifest of a planned checkpoint whose sets are durable.

        Args:
            planned: Result of `plan`.
            handles: Handles of the sets, in the order of the request.
            note: Handle of the note; None if it has none.
            created_ms: Time of creation.
        """
        record = planned.record
        objects = {handle.object_key for handle in handles}
        return Manifest(
            kind=ManifestKind.DELTA if record.start is None else ManifestKind.COMPLETE,
            job_uid=self.job_uid,
            id=record.checkpoint_id,
            generation=0,
            created_ms=created_ms,
            segments=tuple(handles),
            earlier=() if record.start is None else tuple(record.start.log),
            materializations=() if record.start is None else record.start.materializations,
            note=None if note is None or note.object_key in objects else note,
            under_way=planned.under_way,
            **header_of(record),
        )


def check_follows(checkpoint_id: int, base: CheckpointRef | None) -> None:
    """Raise `ConflictError` unless the id directly follows the base's: a gap would bypass a fence there (I4)."""
    if checkpoint_id != (base.id + 1 if base is not None else 0):
        before = f"checkpoint {base.id}" if base is not None else "nothing"
        raise ConflictError(f"checkpoint {checkpoint_id} cannot follow {before}: ids must be consecutive")


def check_size(request: CompleteRequest) -> None:
    """Raise `InvalidInputError` if offsets and states are too long or too many: those of many checkpoints are held."""
    states = [state for operator in request.operators for state in operator.states.values()]
    texts = [request.offsets, *(operator.key_schema for operator in request.operators)]
    texts += [text for state in states for text in (state.kind, state.schema, *state.earlier)]
    texts += [name for operator in request.operators for name in operator.states]
    chars = sum(map(len, texts)) + _STATE_CHARS * len(states)
    if chars > TEXT_CHARS_MAX:
        raise InvalidInputError(
            f"offsets and states have {chars} characters together, at most {TEXT_CHARS_MAX} are allowed; "
            "read the sources in several queries"
        )


def check_writers(job: str, handles: Sequence[SegmentHandle], request: CompleteRequest, checkpoint_id: int) -> None:
    """
    Raise if a checkpoint would name several writers for one partition (I2) or sets that are not its own.

    In a closed batch a second writer may have followed the first one. It knew the first one and the number of its
    sets: its own sqns continue them. So two attempts of one pass are never taken for both passes.

    Raises:
        InvalidInputError: A set is named twice or is of another checkpoint, or a partition has too many writers.
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
                f"partition {partition} of {operator!r}, whose change sets are not numbered consecutively"
            )


def _follow_each_other(sqns: Mapping[Writer, Sequence[int]]) -> bool:
    """Return whether the sqns of an epoch's writers, in the order of their attempts, are consecutive from 0."""
    ordered = sorted(sqns, key=lambda writer: writer.attempt)
    numbers = [sqn for writer in ordered for sqn in sorted(sqns[writer])]
    return numbers == list(range(len(numbers)))
