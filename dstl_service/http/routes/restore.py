"""Routes that stream state to tables as frames, see `dstl_service.wire.restore`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse
from prometheus_client import Gauge
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send

from dstl_service.composition import Parts
from dstl_service.http.requests import ANSWERED_BEFORE, IN_DIGITS, JobName, ServiceParts
from dstl_service.http.task_requests import RestoreRequest
from dstl_service.materialization.pending import Offer
from dstl_service.restore.plan import RestorePlan, SnapshotStream
from dstl_service.restore.progress import RestoreProgress
from dstl_service.restore.table_id import TableId
from dstl_service.wire import (
    NAME_PATTERN,
    EndFrame,
    ErrorFrame,
    FileFrame,
    GoneFrame,
    PlanFrame,
    ReadRequest,
    SegmentFrame,
    SetFrame,
    SnapshotFrame,
    write_frame,
)
from storage.checksum import BytesLike
from storage.errors import DstlError, NotFoundError
from storage.model import ChangeSetId, SegmentHandle
from storage.validation import KEY_GROUP_MAX, NUMBER_MAX

router = APIRouter(prefix="/v1/jobs/{job}", tags=["restore"])

_KeyGroup = Annotated[int, IN_DIGITS, Field(ge=0, le=KEY_GROUP_MAX)]
_RefText = Annotated[str, Field(pattern=r"^[0-9]{1,19}\.[0-9]{1,18}\.[0-9A-Za-z_-]{1,64}$")]
_MEDIA_TYPE = "application/vnd.dstl.frames"
_AT_ONCE_BYTES_MAX = 1 << 20
"""Up to this size, such as the last batch's change set, the answer is one piece: a stream costs three times as much."""


class _RestoreParameters(BaseModel):
    """Parameters of `restore` as the OpenAPI document has them; `RestoreRequest` parses them."""

    operator: Annotated[str, Field(pattern=NAME_PATTERN)]
    first_key_group: _KeyGroup
    last_key_group: _KeyGroup
    to: _RefText
    have: _RefText | None = None
    output: bool = False
    only: Annotated[int, IN_DIGITS, Field(ge=0, le=NUMBER_MAX)] | None = None
    copy_: Annotated[bool, Field(alias="copy")] = False
    files: bool = False


@router.get("/restore", response_class=StreamingResponse, responses={200: {"content": {_MEDIA_TYPE: {}}}})
async def restore(job: JobName, declared: Annotated[_RestoreParameters, Query()]) -> Response:
    """
    Stream the state and changes that bring a table of these key groups from version `have` to checkpoint `to`.

    Without `have`, the table is empty.

    Frames, in this order:

    - ``plan``: with ``full`` true, empty the table first. With ``materialize`` true, make a snapshot of the table when
      it is at the checkpoint, and post it to ``materializations``. ``materialized`` is the report to the driver about
      the table's snapshot: the announcement of one, the handle of a stored one, or null.
    - for each materialization that counts one ``snapshot``, then its files, each as one or more ``file``: verify them
      against their checksum, take the key groups ``counted``.
    - one ``segment`` per change set, in the order in which they must be applied; only its key groups ``counted``.
    - ``end``.

    With `output` true, `operator` is a sink, or holds rows that another operator has set aside: the segments are those
    rows, without materializations; with `only`, those of this checkpoint alone.
    With `copy` true, the table is a standby's copy: it is asked for no snapshot, and its bytes are counted apart.
    With `files` true, a ``file`` on the disk of the service's host may have its ``path`` in place of its bytes.

    Instead of the rest there may be one ``error``, or one ``gone``: the changes after `have` were deleted with subsumed
    checkpoints, so the table must be emptied and restored as a whole.
    """
    raise NotImplementedError(ANSWERED_BEFORE)


@router.post("/read", response_class=StreamingResponse, responses={200: {"content": {_MEDIA_TYPE: {}}}})
async def read(job: JobName, body: ReadRequest, parts: ServiceParts) -> Response:
    """
    Return change sets of a checkpoint that does not exist yet.

    Frames: one ``segment`` for each, in the order of the request, then ``end``; or one ``error``.
    """
    size_bytes, sets = await parts.restores.sets(job, body.epoch, body.refs)
    frames = parts.restores.in_turn(job, _set_frames(sets))
    return _Stream(frames, parts.restores.room_for_stream(job, size_bytes))


def _set_frames(sets: Iterator[tuple[ChangeSetId, int, BytesLike]]) -> Iterator[bytes]:
    try:
        for set_id, checksum, payload in sets:
            yield write_frame(SetFrame(str(set_id), f"{checksum:016x}"), payload)
    except DstlError as error:
        yield write_frame(ErrorFrame(error.to_dict()))
    yield write_frame(EndFrame())


async def answer_restore(parts: Parts, request: RestoreRequest) -> Response:
    """Return the answer to a restore: a stream, or one piece if it is small."""
    job = request.job
    plan, offer = await parts.restores.plan(
        job,
        request.operator,
        request.key_groups,
        request.from_checkpoint,
        request.to_checkpoint,
        is_for_task=request.is_for_task,
        only=request.only,
    )
    metrics = parts.metrics.restores
    running = metrics.restores_running.labels(job)
    at_hand = parts.restores.at_hand(plan) if plan.size_bytes <= _AT_ONCE_BYTES_MAX else None
    payloads = parts.restores.payloads(plan, at_hand, is_for_task=request.is_for_task)
    sent = metrics.copied_bytes if request.is_copy else metrics.restored_bytes
    table = TableId(job, request.operator, request.key_groups)
    progress = parts.restores.progress(table, plan, sent.labels(job).inc)
    snapshots = parts.restores.snapshots(plan, by_path=request.takes_files)
    frames = _frames(plan, offer, snapshots, payloads, progress)
    if plan.size_bytes > _AT_ONCE_BYTES_MAX:
        # A sink that hangs must not keep tables waiting.
        room = parts.restores.room_for_stream(f"{job} output" if request.is_output else job, plan.held_bytes)
        return _Stream(parts.restores.in_turn(job, frames), room, running, parts.restores.hold_plan(job, plan))
    with running.track_inprogress():
        body = await parts.restores.joined(job, frames) if at_hand is None else b"".join(frames)
    return Response(body, media_type=_MEDIA_TYPE)


class _Stream(StreamingResponse):
    """Streamed frames; they hold their room, and a restore counts as running, until the end or the disconnection."""

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        room: AbstractAsyncContextManager[None],
        running: Gauge | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(frames, media_type=_MEDIA_TYPE)
        self._room = room
        self._running = running
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with nullcontext() if self._running is None else self._running.track_inprogress():
                async with self._room:
                    await super().__call__(scope, receive, send)
        finally:
            self._at_end()


def _frames(
    plan: RestorePlan,
    offer: Offer,
    snapshots: SnapshotStream,
    payloads: Iterator[tuple[SegmentHandle, BytesLike]],
    progress: RestoreProgress,
) -> Iterator[bytes]:
    """Yield the frames of an answer; a payload counts as sent once the next frame is asked for."""
    yield write_frame(
        PlanFrame(
            is_full=plan.is_full,
            materialize=offer.materialize,
            materialized=offer.report,
            snapshots=len(plan.materializations),
            segments=len(plan.handles),
            size_bytes=plan.size_bytes,
        )
    )
    try:
        yield from _snapshot_frames(snapshots, progress.sent)
        for handle, payload in payloads:
            entry = handle.entry
            frame = SegmentFrame(
                source=handle.object_key,
                checksum=f"{entry.checksum:016x}",
                key_groups=entry.key_groups,
                counted=plan.counted(handle),
                checkpoint_id=entry.id.checkpoint_id,
                count=entry.count,
            )
            yield write_frame(frame, payload)
            progress.sent(entry.size_bytes)
        progress.ended()
    except DstlError as error:
        is_gone = not plan.is_full and isinstance(error.__cause__, NotFoundError)
        yield write_frame(GoneFrame() if is_gone else ErrorFrame(error.to_dict()))
    yield write_frame(EndFrame())


def _snapshot_frames(snapshots: SnapshotStream, count_sent: Callable[[int], None]) -> Iterator[bytes]:
    for planned, index, pieces in snapshots:
        yield write_frame(
            SnapshotFrame(
                index_key=planned.handle.index_key,
                version=index.version.to_text(),
                key_groups=index.key_groups,
                counted=planned.counted,
                files=len(index.files),
            )
        )
        for file, offset, found in pieces:
            frame = FileFrame(file.name, file.object_key, offset, file.size_bytes, file.checksum)
            if isinstance(found, Path):
                yield write_frame(replace(frame, path=str(found)))
                count_sent(file.size_bytes)
            else:
                yield write_frame(frame, found)
                count_sent(len(found))
