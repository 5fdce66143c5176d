"""Receives change sets from tasks, and persists them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from dstl_service.composition import Parts
from dstl_service.http.errors import BodyTimeoutError
from dstl_service.http.requests import ANSWERED_BEFORE, IN_DIGITS, JobName, ServiceParts
from dstl_service.http.task_requests import AppendRequest
from dstl_service.intake.in_flight_limiter import Place
from dstl_service.wire import NAME, NAME_PATTERN, ChangeSetRef, PersistRequest, PersistResponse
from storage.errors import InvalidInputError
from storage.model import Segment
from storage.validation import COUNT_MAX, KEY_GROUP_MAX, NUMBER_MAX

BODY_WAIT_S = 30.0
"""Longest wait for the next piece of a body; meanwhile the body occupies room that others need."""

router = APIRouter(prefix="/v1/jobs/{job}", tags=["change sets"])

_Number = Annotated[int, IN_DIGITS, Field(ge=0, le=NUMBER_MAX)]
_KeyGroup = Annotated[int, IN_DIGITS, Field(ge=0, le=KEY_GROUP_MAX)]


class _AppendParameters(BaseModel):
    """Parameters of `append` as the OpenAPI document has them; `AppendRequest` parses them."""

    operator: Annotated[str, Field(pattern=NAME_PATTERN)]
    checkpoint_id: _Number
    epoch: _Number
    attempt: _Number
    partition: _KeyGroup
    sqn: _Number
    first_key_group: _KeyGroup
    last_key_group: _KeyGroup
    count: Annotated[int, IN_DIGITS, Field(ge=0, le=COUNT_MAX)]
    checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", description="XXH3-64 of the body, 16 hex digits.")]
    preemptive: bool = False
    job_uid: Annotated[
        str, Field(pattern=rf"^({NAME})?$", description="Uid of the job; empty for the current job of this name.")
    ] = ""


@router.post(
    "/change-sets",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def append(job: JobName, declared: Annotated[_AppendParameters, Query()]) -> ChangeSetRef:
    """
    Take one change set in. The answer means *received*: it dies with this process until it is persisted.

    Sending the same set again is harmless. A `preemptive` set is uploaded without waiting for the checkpoint.
    """
    raise NotImplementedError(ANSWERED_BEFORE)


@router.post("/persist")
async def persist(job: JobName, body: PersistRequest, parts: ServiceParts) -> PersistResponse:
    """Make change sets durable and return their handles, or only start to with `wait` false."""
    persisted = await parts.persister.persist_claimed(job, body.refs, wait=body.wait, note=body.note)
    return PersistResponse([handle.to_dict() for handle in persisted.all_handles])


async def answer_append(parts: Parts, request: AppendRequest, scope: Scope, receive: Receive) -> Response:
    """
    Wait for room, read the body, which is one change set, and append it; return the answer.

    Raises:
        InvalidInputError: There is no content-length, or the body can never fit; it is not read.
        NotFoundError: The store has no such job or epoch; the body is not read.
        OverloadedError: No room became free in time; the rest of the body is not read.
        ClientDisconnect: The client disconnected.
        BodyTimeoutError: The client is connected but sent nothing for `BODY_WAIT_S`.
    """
    intake = parts.intake
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if not length.isdigit():
        raise InvalidInputError(f"a change set needs a content-length of at most {intake.change_set_bytes_max} bytes")
    await parts.jobs.owned(request.set_id.job, request.set_id.writer.epoch, request.job_uid)
    async with intake.room_for(request.set_id, int(length)) as place:
        payload = await _collect_body(receive, int(length), place)
        segment = Segment(request.set_id, request.key_groups, request.count, payload, request.checksum)
        ref = intake.append(segment, preemptive=request.is_preemptive)
    return Response(ref.to_json(), media_type="application/json")


async def _collect_body(receive: Receive, size_bytes_max: int, place: Place) -> bytes:
    chunks: list[bytes] = []
    size_bytes = 0
    more = True
    now_s = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(BODY_WAIT_S) as wait:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientDisconnect
                chunk: bytes = message.get("body", b"")
                more = message.get("more_body", False)
                size_bytes += len(chunk)
                if size_bytes > size_bytes_max:
                    raise InvalidInputError(f"the body is longer than its content-length of {size_bytes_max} bytes")
                chunks.append(chunk)
                await place.arrived(len(chunk))
                wait.reschedule(now_s() + BODY_WAIT_S)
    except TimeoutError:
        raise BodyTimeoutError(
            f"{size_bytes} of {size_bytes_max} bytes of a change set arrived, then none for {BODY_WAIT_S:g} s; send "
            "the change set again"
        ) from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
