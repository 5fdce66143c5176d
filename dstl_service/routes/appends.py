"""Routes by which tasks hand their change sets over and have them made durable."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from dstl_service.routes.common import NAME_PATTERN, JobName, Service
from dstl_service.wire import ChangeSetRef, PersistRequest, PersistResponse
from storage.errors import InvalidInputError
from storage.model import KEY_GROUP_MAX, NUMBER_MAX, ChangeSetId, KeyGroupRange, Segment, Writer

router = APIRouter(prefix="/v1/jobs/{job}", tags=["change sets"])

_Number = Annotated[int, Query(ge=0, le=NUMBER_MAX)]
_KeyGroup = Annotated[int, Query(ge=0, le=KEY_GROUP_MAX)]


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
    job: JobName,
    request: Request,
    service: Service,
    operator: Annotated[str, Query(pattern=NAME_PATTERN)],
    checkpoint_id: _Number,
    epoch: _Number,
    attempt: _Number,
    partition: Annotated[int, Query(ge=0, le=KEY_GROUP_MAX)],
    sqn: _Number,
    first_key_group: _KeyGroup,
    last_key_group: _KeyGroup,
    count: _Number,
    checksum: Annotated[str, Query(pattern=r"^[0-9a-f]{16}$", description="XXH3-64 of the body, 16 hex digits.")],
    preemptive: bool = False,
) -> ChangeSetRef:
    """
    Take one change set in. The answer means *received*: it dies with this process until it is persisted.

    Sending the same set again is harmless. A `preemptive` set is uploaded without waiting for the checkpoint.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    async for chunk in request.stream():
        size_bytes += len(chunk)
        if size_bytes > service.change_set_bytes_max:
            raise InvalidInputError(
                f"a change set has at most {service.change_set_bytes_max} bytes here; send several smaller ones "
                "(preemptive_bytes of the client), or raise in_flight_bytes_max"
            )
        chunks.append(chunk)
    payload = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    set_id = ChangeSetId(job, operator, checkpoint_id, Writer(epoch, attempt), partition, sqn)
    key_groups = KeyGroupRange(first_key_group, last_key_group)
    segment = Segment(set_id, key_groups, count, payload, int(checksum, 16))
    return service.append(segment, preemptive=preemptive)


@router.post("/persist")
async def persist(job: JobName, body: PersistRequest, service: Service) -> PersistResponse:
    """Make change sets durable and return their handles, or only start to with `wait` false."""
    handles = await service.persist(job, body.refs, wait=body.wait)
    return PersistResponse([handle.to_dict() for handle in handles])
