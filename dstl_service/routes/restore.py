"""The route by which a table gets what it lacks: a stream of frames, see `dstl_service.wire.encode_frame`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from dstl_service.restore import RestorePlan
from dstl_service.routes.common import JobName, Service
from dstl_service.service import ChangelogService
from dstl_service.wire import NAME_PATTERN, CheckpointRef, encode_frame
from storage.checksum import BytesLike
from storage.errors import DstlError, NotFoundError
from storage.model import KEY_GROUP_MAX, KeyGroupRange

router = APIRouter(prefix="/v1/jobs/{job}", tags=["restore"])

_KeyGroup = Annotated[int, Query(ge=0, le=KEY_GROUP_MAX)]
_RefText = Annotated[str, Query(pattern=r"^\d{1,19}\.\d{1,9}\.[0-9A-Za-z_-]{1,64}$")]
_MEDIA_TYPE = "application/vnd.dstl.frames"
_AT_ONCE_BYTES_MAX = 1 << 20
"""What is not larger, such as the change set of the last batch, is answered at once: a stream costs thrice as much."""


@router.get("/restore", response_class=StreamingResponse, responses={200: {"content": {_MEDIA_TYPE: {}}}})
async def restore(
    job: JobName,
    service: Service,
    operator: Annotated[str, Query(pattern=NAME_PATTERN)],
    first_key_group: _KeyGroup,
    last_key_group: _KeyGroup,
    to: _RefText,
    have: _RefText | None = None,
) -> Response:
    """
    Stream the change sets that lead a table of these key groups from version `have` (none: empty) to checkpoint `to`.

    Frames: one of kind ``plan`` (``full`` true: empty the table first), one ``segment`` per change set in the order in
    which they must be applied, one ``end``. Instead of the rest there may be one ``error``; or one ``gone``: what led
    from `have` was deleted with checkpoints that were subsumed, so the table must be emptied and everything asked for.
    """
    plan = await service.plan_restore(
        job,
        operator,
        KeyGroupRange(first_key_group, last_key_group),
        CheckpointRef.parse(have) if have else None,
        CheckpointRef.parse(to),
    )
    if plan.size_bytes <= _AT_ONCE_BYTES_MAX:
        return Response(await asyncio.to_thread(b"".join, _frames(service, plan)), media_type=_MEDIA_TYPE)
    return StreamingResponse(_frames(service, plan), media_type=_MEDIA_TYPE)


def _frames(service: ChangelogService, plan: RestorePlan) -> Iterator[bytes]:
    yield _joined({"kind": "plan", "full": plan.is_full, "segments": len(plan.handles), "bytes": plan.size_bytes})
    try:
        for handle, payload in service.read_plan(plan):
            entry = handle.entry
            header = {
                "kind": "segment",
                "object": handle.object_key,
                "checkpoint_id": entry.id.checkpoint_id,
                "first": entry.key_groups.first,
                "last": entry.key_groups.last,
                "count": entry.count,
                "checksum": f"{entry.checksum:016x}",
            }
            yield _joined(header, payload)
    except DstlError as error:
        if not plan.is_full and isinstance(error.__cause__, NotFoundError):
            yield _joined({"kind": "gone"})
        else:
            yield _joined({"kind": "error", "error": error.to_dict()})
    yield _joined({"kind": "end"})


def _joined(header: dict[str, Any], payload: BytesLike = b"") -> bytes:
    return b"".join(encode_frame(header, payload))
