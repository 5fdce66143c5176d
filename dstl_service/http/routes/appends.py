"""Routes that receive change sets from tasks and persist them; see also `fast_path`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from dstl_service.http.requests import IN_DIGITS, JobName, ServiceParts, take_in
from dstl_service.http.task_requests import AppendRequest
from dstl_service.wire import NAME, NAME_PATTERN, ChangeSetRef, PersistRequest, PersistResponse
from storage.validation import COUNT_MAX, KEY_GROUP_MAX, NUMBER_MAX

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
    job_uid: Annotated[str, Field(pattern=rf"^({NAME})?$", description="Of the job that is meant.")] = ""


@router.post(
    "/change-sets",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def append(
    job: JobName, request: Request, parts: ServiceParts, _declared: Annotated[_AppendParameters, Query()]
) -> ChangeSetRef:
    """
    Take one change set in. The answer means *received*: it dies with this process until it is persisted.

    Sending the same set again is harmless. A `preemptive` set is uploaded without waiting for the checkpoint.
    """
    parsed = AppendRequest.parse(job, request.scope["query_string"])
    return await take_in(parts.intake, request.scope, request.receive, parsed)


@router.post("/persist")
async def persist(job: JobName, body: PersistRequest, parts: ServiceParts) -> PersistResponse:
    """Make change sets durable and return their handles, or only start to with `wait` false."""
    persisted = await parts.persister.persist_claimed(job, body.refs, wait=body.wait, note=body.note)
    return PersistResponse([handle.to_dict() for handle in persisted.all_handles])
