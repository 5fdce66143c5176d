"""
Checkpoint records and notes: with them, segment objects alone define the content of a checkpoint (I10).

Segment objects hold the change sets of many attempts, including those that no checkpoint accepted. So the coordinator
writes a *record* of each checkpoint's content: the accepted sets, the checkpoint before, and for a complete manifest
all earlier state, so that no record needs those of more than `COMPLETE_EVERY` checkpoints. The manifest is built from
it. The record is stored as a *note*, a small segment of the reserved operator `NOTE_OPERATOR`, in the upload of the
checkpoint's sets. A restore never reads notes; `dstl_service.repair.rebuild` does.

A record may have megabytes, and is decoded beside an event loop: other threads run every few milliseconds meanwhile.

A note is written before its checkpoint exists; a later record that names the checkpoint as its base proves that it
existed.

No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dstl_service.formats.checkpoint_header import CheckpointHeader, base_from_json, header_of
from dstl_service.formats.checksummed_json import reading
from dstl_service.formats.fork_origin import origin_from_json, origin_to_json
from dstl_service.formats.manifest import (
    Manifest,
    StateView,
    closed_from_json,
    flatten_objects,
    group_by_object,
    operators_from_json,
    operators_to_json,
)
from dstl_service.process.memory import without_collections
from dstl_service.wire import NOTE_OPERATOR, ChangeSetRef, CheckpointRef, CompleteRequest, ForkOrigin
from storage.checksum import BytesLike
from storage.errors import CorruptDataError, InvalidInputError, NewerFormatError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId, MaterializationHandle, Segment, SegmentHandle, Writer
from storage.stored_json import whole_number

FORMAT = 1


@dataclass(frozen=True, slots=True)
class NotedSet:
    """An accepted change set, and the checksum of its payload if the request had it."""

    id: ChangeSetId
    checksum: int | None


@dataclass(frozen=True, slots=True)
class CheckpointRecord(CheckpointHeader):
    """
    The content of a future checkpoint. The target of a rewind, and the first checkpoint of a fork, add nothing.

    Args:
        job: Name of the job.
        job_uid: Distinguishes lives of one job name.
        max_parallelism: Number of the job's key groups.
        checkpoint_id: Its id.
        sets: The accepted sets, each of this checkpoint and epoch.
        start: All earlier state, if the manifest is to be complete; empty for a job's first checkpoint.
        planned_ms: When its coordinator decided it, by that one's clock: of an epoch's tries at a checkpoint, which may
            be stored by different hosts, the last counts. 0 if it is unknown.
    """

    job: str
    job_uid: str
    max_parallelism: int
    checkpoint_id: int
    sets: tuple[NotedSet, ...]
    start: StateView | None = None
    planned_ms: int = 0

    def to_segment(self) -> Segment:
        """Return the note that stores this record."""
        return Segment.of(*self.id_and_groups, 1, encode_record(self))

    @property
    def id_and_groups(self) -> tuple[ChangeSetId, KeyGroupRange]:
        """Identity and key groups of the note."""
        set_id = ChangeSetId(self.job, NOTE_OPERATOR, self.checkpoint_id, Writer(self.epoch, 0), 0, 0)
        return set_id, KeyGroupRange(0, self.max_parallelism - 1)


def is_note(set_id: ChangeSetId) -> bool:
    """Return whether a segment is a checkpoint's note, which no task sent and no table requests."""
    return set_id.operator == NOTE_OPERATOR


def sent_by_tasks(ids: Iterable[ChangeSetId]) -> list[ChangeSetId]:
    """Return the ids without those of notes, which no metric, message or cache includes."""
    return [set_id for set_id in ids if not is_note(set_id)]


def record_of(
    job: str,
    job_uid: str,
    max_parallelism: int,
    checkpoint_id: int,
    request: CompleteRequest,
    start: StateView | None,
    forked_from: ForkOrigin | None = None,
    planned_ms: int = 0,
) -> CheckpointRecord:
    """Return the record of a requested checkpoint."""
    return CheckpointRecord(
        job=job,
        job_uid=job_uid,
        max_parallelism=max_parallelism,
        checkpoint_id=checkpoint_id,
        uid=request.uid,
        epoch=request.epoch,
        base=request.base,
        query_id=request.query_id,
        offsets=request.offsets,
        operators=tuple(request.operators),
        sets=tuple(_noted(job, ref) for ref in request.refs),
        start=start,
        closed_ms=request.closed_ms,
        forked_from=forked_from,
        planned_ms=planned_ms,
    )


def record_of_rewind(job: str, max_parallelism: int, manifest: Manifest) -> CheckpointRecord:
    """
    Return the record of the first manifest of a rewind's branch, or of a fork.

    With it a rebuild restores no checkpoint that a rewind gave up, and finds the state with which a fork began.
    """
    return CheckpointRecord(
        job=job,
        job_uid=manifest.job_uid,
        max_parallelism=max_parallelism,
        checkpoint_id=manifest.id,
        sets=(),
        start=StateView(manifest.materializations, [*manifest.earlier, *manifest.segments]),
        **header_of(manifest),
    )


def encode_record(record: CheckpointRecord) -> bytes:
    """Return the payload of a note: one JSON document, which the segment's checksum covers."""
    return json.dumps(
        {
            "format": FORMAT,
            "job": record.job,
            "job_uid": record.job_uid,
            "max_parallelism": record.max_parallelism,
            "id": record.checkpoint_id,
            "uid": record.uid,
            "epoch": record.epoch,
            "base": record.base.to_text() if record.base else None,
            "query_id": record.query_id,
            "offsets": record.offsets,
            "operators": operators_to_json(record.operators),
            "sets": [_set_to_json(noted) for noted in record.sets],
            "start": _start_to_json(record.start) if record.start else None,
            **({} if record.closed_ms is None else {"closed_ms": record.closed_ms}),
            **({"rewound_from": record.rewound_from.to_text()} if record.rewound_from else {}),
            **({"forked_from": origin_to_json(record.forked_from)} if record.forked_from else {}),
            **({"planned_ms": record.planned_ms} if record.planned_ms else {}),
        },
        separators=(",", ":"),
    ).encode()


def decode_record(data: BytesLike, source: str) -> CheckpointRecord:
    """
    Read the record in a note.

    Raises:
        NewerFormatError: A newer version wrote it; names `source`, and says what to do.
        CorruptDataError: `data` is not a note; names `source`.
    """
    with reading(f"the note in {source}", source=source), without_collections():
        document = json.loads(bytes(data), parse_int=_as_int)
        NewerFormatError.check(f"the note in {source}", document["format"], FORMAT, source=source)
        return _from_json(document)


def read_record(job: str, text: str) -> CheckpointRecord:
    """
    Read the record in a note that a coordinator sent.

    Raises:
        InvalidInputError: The text is not a note, or one of another job.
    """
    try:
        record = decode_record(text.encode(errors="replace"), "a request")
    except CorruptDataError as error:
        raise InvalidInputError(error.message) from error
    if record.job != job:
        raise InvalidInputError(f"a note of job {record.job!r} was sent to job {job!r}")
    return record


def received_segment(job: str, text: str) -> Segment:
    """Return the note that a coordinator sent, its text unchanged; see `read_record`."""
    sent = read_record(job, text).id_and_groups
    return Segment.of(*sent, 1, text.encode(errors="replace"))


def _from_json(document: dict[str, Any]) -> CheckpointRecord:
    job, checkpoint_id, epoch = document["job"], document["id"], document["epoch"]
    KeyGroupRange(0, document["max_parallelism"] - 1)  # raises for an invalid max_parallelism
    ref = CheckpointRef.parse(f"{checkpoint_id}.0.{document['uid']}")
    return CheckpointRecord(
        job=job,
        job_uid=str(document["job_uid"]),
        max_parallelism=document["max_parallelism"],
        checkpoint_id=ref.id,
        uid=ref.uid,
        epoch=epoch,
        base=base_from_json(document["base"], ref.id),
        query_id=str(document["query_id"]),
        offsets=str(document["offsets"]),
        operators=operators_from_json(document["operators"]),
        sets=tuple(_set_from_json(job, checkpoint_id, epoch, item) for item in _taken_out(document["sets"])),
        start=_start_from_json(document["start"]) if document["start"] else None,
        closed_ms=closed_from_json(document),
        rewound_from=CheckpointRef.parse(document["rewound_from"]) if document.get("rewound_from") else None,
        forked_from=origin_from_json(document.get("forked_from")),
        planned_ms=whole_number(document.get("planned_ms", 0)),
    )


def _as_int(digits: str) -> int:
    # Other threads can run between two numbers; the parser alone would hold the GIL until its end.
    return int(digits)


def _taken_out(items: list[Any]) -> Iterator[Any]:
    """Yield items and release each one: releasing all at once would block other threads."""
    items.reverse()
    while items:
        yield items.pop()


def _noted(job: str, ref: ChangeSetRef) -> NotedSet:
    if ref.handle is not None:
        entry = SegmentHandle.from_dict(ref.handle).entry
        return NotedSet(entry.id, entry.checksum)
    return NotedSet(ref.change_set_id(job), _checksum(ref.checksum))


def _checksum(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text, 16)
    except ValueError:
        raise InvalidInputError(f"a checksum has 16 hexadecimal digits, got {text[:20]!r}") from None


def _set_to_json(noted: NotedSet) -> Sequence[str | int | None]:
    # Job, checkpoint and epoch are the record's. There may be thousands of sets, so they are written without names.
    checksum = None if noted.checksum is None else f"{noted.checksum:016x}"
    return [noted.id.operator, noted.id.partition, noted.id.writer.attempt, noted.id.sqn, checksum]


def _set_from_json(job: str, checkpoint_id: int, epoch: int, item: Sequence[Any]) -> NotedSet:
    operator, partition, attempt, sqn, checksum = item
    set_id = ChangeSetId(job, operator, checkpoint_id, Writer(epoch, attempt), partition, sqn)
    return NotedSet(set_id, _checksum(checksum))


def _start_to_json(start: StateView) -> dict[str, Any]:
    return {
        "materializations": [handle.to_dict() for handle in start.materializations],
        "earlier": group_by_object(start.log),
    }


def _start_from_json(document: dict[str, Any]) -> StateView:
    materializations = tuple(MaterializationHandle.from_dict(data) for data in document["materializations"])
    return StateView(materializations, list(flatten_objects(document["earlier"])))
