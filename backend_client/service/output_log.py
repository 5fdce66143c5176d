"""Reads rows from the log, checkpoint by checkpoint: the output that a sink has to publish, and rows set aside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from backend_client.service.client import ServiceClient
from backend_client.service.restore import decoded_segment, unexpected_frame
from dstl_service.wire import CheckpointRef, EndFrame, GoneFrame, PlanFrame, SegmentFrame, read_frames
from storage.change_set import ChangeColumns
from storage.errors import ConflictError, NotFoundError
from storage.key_groups import KeyGroupRange


class LoggedOutput(NamedTuple):
    """One change set of output: its checkpoint's id, the name of the object that holds it, and its changes."""

    checkpoint_id: int
    source: str
    changes: ChangeColumns


def read_output(
    client: ServiceClient,
    job: str,
    sink: str,
    slot: int,
    after: CheckpointRef | None,
    to: CheckpointRef,
    newest: CheckpointRef | None = None,
    *,
    is_set_back: bool = False,
) -> Iterator[LoggedOutput]:
    """
    Yield the change sets of a slot's output, in order.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        sink: Name of the sink.
        slot: Number of the slot.
        after: A checkpoint of the branch of `to`; output up to it is left out. None: all that the log has.
        to: The checkpoint to end with.
        newest: A later checkpoint of the same branch: its log has the output, too, if `to` is no longer stored.
        is_set_back: Output after `after` was published before, and may have left the log since.

    Raises:
        CorruptDataError: Stored output is damaged or missing; names the object.
        NotFoundError: Neither `to` nor `newest` is stored any more.
        ConflictError: With `is_set_back`: the checkpoints after `after` are no longer stored, so output is missing.
        UnavailableError: The sidecar or its store does not answer.
    """
    done, first = 0, 0 if after is None else after.id + 1
    missing: NotFoundError | None = None
    # A checkpoint's own log has all that was unpublished, in the same order; so has that of every later one.
    for have, until in ((after, to), (None, to), (None, newest or to)):
        if is_set_back and have is None and after is not None:
            raise ConflictError(
                f"slot {slot} of sink {sink!r} had published more than checkpoint {after.id}, where it stands: its "
                "system was set back, and the log no longer has the missing output. Rewind the job to that checkpoint "
                "or one before, or give the sink another name to continue without it"
            )
        logged = _read(client, job, sink, slot, have, until)
        wanted = (item for item in logged if first <= item.checkpoint_id <= to.id)
        try:
            for item in islice(wanted, done, None):
                yield item
                done += 1
        except NotFoundError as error:
            missing = error
        else:
            return
    assert missing is not None
    raise missing


def read_rows(
    client: ServiceClient, job: str, operator: str, key_groups: KeyGroupRange, at: CheckpointRef, checkpoint_id: int
) -> Iterator[LoggedOutput]:
    """
    Yield the change sets that one checkpoint added to an operator's rows in the log, in order.

    Args:
        client: The sidecar's client.
        job: Name of the job.
        operator: Name of the operator that has the rows.
        key_groups: Change sets that share none of these are left out.
        at: The checkpoint that still lists them.
        checkpoint_id: The checkpoint that added them.

    Raises:
        CorruptDataError: Stored rows are damaged or missing; names the object.
        UnavailableError: The sidecar or its store does not answer.
    """
    with client.restore(job, operator, key_groups, None, at.to_text(), is_output=True, only=checkpoint_id) as stream:
        yield from _logged(stream, None)


def _read(
    client: ServiceClient, job: str, sink: str, slot: int, after: CheckpointRef | None, to: CheckpointRef
) -> Iterator[LoggedOutput]:
    have = None if after is None else after.to_text()
    with client.restore(job, sink, KeyGroupRange(slot, slot), have, to.to_text(), is_output=True) as stream:
        yield from _logged(stream, after)


def _logged(stream: Iterator[tuple[dict[str, Any], bytes]], after: CheckpointRef | None) -> Iterator[LoggedOutput]:
    for frame, payload in read_frames(stream):
        match frame:
            case PlanFrame() if frame.is_full and after is not None:
                raise NotFoundError("the checkpoint to begin with is no longer stored")
            case PlanFrame():
                continue
            case SegmentFrame():
                yield LoggedOutput(frame.checkpoint_id, frame.source, decoded_segment(frame, payload))
            case GoneFrame():
                raise NotFoundError("checkpoints after the one to begin with are no longer stored")
            case EndFrame():
                return
            case _:
                raise unexpected_frame(frame)
