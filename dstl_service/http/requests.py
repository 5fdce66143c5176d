"""Shared by all routes: access to the service's parts, types of path parameters, and reading a change set's body."""

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
from dstl_service.http.task_requests import AppendRequest
from dstl_service.intake.in_flight_limiter import Place
from dstl_service.intake.intake import Intake
from dstl_service.wire import NAME_PATTERN, ChangeSetRef
from storage.errors import InvalidInputError
from storage.model import Segment
from storage.validation import NUMBER_MAX

BODY_WAIT_S = 30.0
"""Longest wait for the next piece of a body; meanwhile the body occupies room that others need."""


_DIGITS = re.compile(r"[0-9]+")


def _in_digits(text: object) -> object:
    if isinstance(text, str) and not _DIGITS.fullmatch(text):
        raise ValueError("a number has only the digits 0 to 9, without sign, blanks or separators")
    return text


IN_DIGITS = BeforeValidator(_in_digits)
"""Validator of numbers in paths and queries: Pydantic alone also accepts `1_0`, `+5`, ` 5` and `5.0`."""


async def get_parts(request: Request) -> Parts:
    """Return the parts of the application's service. A coroutine, since FastAPI runs plain functions in a thread."""
    parts: Parts = request.app.state.parts
    return parts


async def take_in(
    intake: Intake,
    scope: Scope,
    receive: Receive,
    request: AppendRequest,
) -> ChangeSetRef:
    """
    Wait for room, read the body, which is one change set, and append it.

    Raises:
        InvalidInputError: There is no content-length, or the body can never fit; it is not read.
        NotFoundError: The store has no such job or epoch; the body is not read.
        OverloadedError: No room became free in time; the rest of the body is not read.
        ClientDisconnect: The client disconnected.
        BodyTimeoutError: The client is connected but sent nothing for `BODY_WAIT_S`.
    """
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if not length.isdigit():
        raise InvalidInputError(f"a change set needs a content-length of at most {intake.change_set_bytes_max} bytes")
    await intake.admit(request.set_id, request.job_uid)
    async with intake.room_for(request.set_id, int(length)) as place:
        payload = await _collect_body(receive, int(length), place)
        segment = Segment(request.set_id, request.key_groups, request.count, payload, request.checksum)
        return intake.append(segment, preemptive=request.is_preemptive)


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


ServiceParts = Annotated[Parts, Depends(get_parts)]
JobName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.")]
CheckpointId = Annotated[int, IN_DIGITS, Path(ge=0, le=NUMBER_MAX, description="Checkpoint id: Spark's batch id.")]
