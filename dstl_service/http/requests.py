"""What all routes share: how they get the parts of the service, and the names that paths may carry."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import Depends, Path, Request
from pydantic import BeforeValidator
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from dstl_service.composition import Parts
from dstl_service.http.errors import BodyTimeoutError
from dstl_service.intake.in_flight_limiter import Place
from dstl_service.intake.intake import Intake
from dstl_service.wire import NAME_PATTERN, ChangeSetRef
from storage.errors import InvalidInputError
from storage.model import NUMBER_MAX, ChangeSetId, KeyGroupRange, Segment

BODY_WAIT_S = 30.0
"""How long the next piece of a body may take: the body keeps its room from others, and may never come."""


_DIGITS = re.compile(r"[0-9]+")


def _in_digits(text: object) -> object:
    if isinstance(text, str) and not _DIGITS.fullmatch(text):
        raise ValueError("a number here is written in the digits 0 to 9, without a sign, blanks or separators")
    return text


IN_DIGITS = BeforeValidator(_in_digits)
"""Of numbers in paths and queries: Pydantic by itself reads `1_0`, `+5`, ` 5` and `5.0` as well."""


async def get_parts(request: Request) -> Parts:
    """Return the parts of the application's service. A coroutine, for FastAPI runs plain functions in a thread."""
    parts: Parts = request.app.state.parts
    return parts


async def take_in(
    intake: Intake,
    scope: Scope,
    receive: Receive,
    set_id: ChangeSetId,
    key_groups: KeyGroupRange,
    count: int,
    checksum: int,
    *,
    preemptive: bool,
    job_uid: str = "",
) -> ChangeSetRef:
    """
    Read the body of a request that is a change set, when there is room for it, and append it.

    Raises:
        InvalidInputError: It does not say how long it is, or is larger than what can ever be taken in; it is not read.
        NotFoundError: The store has no such job or epoch; it is not read.
        OverloadedError: There is no room; it is not read.
        ClientDisconnect: The client went away.
        BodyTimeoutError: The client is there, for all one can tell, and sends nothing more.
    """
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if not length.isdigit():
        raise InvalidInputError(f"a change set needs a content-length, of at most {intake.change_set_bytes_max}")
    await intake.admit(set_id, job_uid)
    async with intake.room_for(set_id, int(length)) as place:
        payload = await _collect_body(receive, int(length), place)
        return intake.append(Segment(set_id, key_groups, count, payload, checksum), preemptive=preemptive)


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
                    raise InvalidInputError(f"a body of more than the {size_bytes_max} bytes of its content-length")
                chunks.append(chunk)
                await place.arrived(len(chunk))
                wait.reschedule(now_s() + BODY_WAIT_S)
    except TimeoutError:
        raise BodyTimeoutError(
            f"{size_bytes} of {size_bytes_max} bytes of a change set came, no more for {BODY_WAIT_S:g} s: send it again"
        ) from None
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


ServiceParts = Annotated[Parts, Depends(get_parts)]
JobName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.")]
CheckpointId = Annotated[int, IN_DIGITS, Path(ge=0, le=NUMBER_MAX, description="Checkpoint id: Spark's batch id.")]
