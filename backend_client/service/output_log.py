"""Reads the output that a sink has to publish from the log, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from backend_client.service.client import ServiceClient
from backend_client.service.restore import decoded_segment, unexpected_frame
from dstl_service.wire import CheckpointRef, EndFrame, GoneFrame, PlanFrame, SegmentFrame, read_frames
from storage.change_set import ChangeColumns
from storage.key_groups import KeyGroupRange


class LoggedOutput(NamedTuple):
    """One change set of output: its checkpoint's id, the name of the object that holds it, and its changes."""

    checkpoint_id: int
    source: str
    changes: ChangeColumns


class _GoneError(Exception):
    """Checkpoints after the one to begin with are no longer stored."""


def read_output(
    client: ServiceClient, job: str, sink: str, slot: int, after: CheckpointRef | None, to: CheckpointRef
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

    Raises:
        CorruptDataError: Stored output is damaged or missing; names the object.
        UnavailableError: The sidecar or its store does not answer.
    """
    done = 0
    try:
        for logged in _read(client, job, sink, slot, after, to):
            yield logged
            done += 1
    except _GoneError:
        # The newest checkpoint's own log has all that is unpublished, and in the same order.
        newer = (item for item in _read(client, job, sink, slot, None, to) if after is None or item[0] > after.id)
        yield from islice(newer, done, None)


def _read(
    client: ServiceClient, job: str, sink: str, slot: int, after: CheckpointRef | None, to: CheckpointRef
) -> Iterator[LoggedOutput]:
    have = None if after is None else after.to_text()
    with client.restore(job, sink, KeyGroupRange(slot, slot), have, to.to_text(), is_output=True) as stream:
        for frame, payload in read_frames(stream):
            match frame:
                case PlanFrame():
                    continue
                case SegmentFrame() if after is not None and frame.checkpoint_id <= after.id:
                    continue  # a checkpoint that is no longer stored: the answer is the whole log
                case SegmentFrame():
                    yield LoggedOutput(frame.checkpoint_id, frame.source, decoded_segment(frame, payload))
                case GoneFrame():
                    raise _GoneError
                case EndFrame():
                    return
                case _:
                    raise unexpected_frame(frame)
