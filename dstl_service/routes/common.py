"""What all routes share: how they get the service, and the names that paths may carry."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from dstl_service.service import ChangelogService
from dstl_service.wire import NAME_PATTERN
from storage.errors import InvalidInputError
from storage.model import NUMBER_MAX


async def get_service(request: Request) -> ChangelogService:
    """Return the application's service. A coroutine, for FastAPI runs plain functions in a thread."""
    service: ChangelogService = request.app.state.service
    return service


async def collect_body(receive: Receive, size_bytes_max: int) -> bytes:
    """
    Return the body of a request that is a change set.

    Raises:
        InvalidInputError: It is larger than what can ever be taken in; the rest of it is not read.
        ClientDisconnect: The client went away.
    """
    chunks: list[bytes] = []
    size_bytes = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size_bytes += len(chunk)
        if size_bytes > size_bytes_max:
            raise InvalidInputError(
                f"a change set has at most {size_bytes_max} bytes here; send several smaller ones "
                "(preemptive_bytes of the client), or raise in_flight_bytes_max"
            )
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


Service = Annotated[ChangelogService, Depends(get_service)]
JobName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.")]
CheckpointId = Annotated[int, Path(ge=0, le=NUMBER_MAX, description="Checkpoint id: Spark's batch id.")]
