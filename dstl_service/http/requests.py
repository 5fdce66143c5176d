"""Shared by all routes: access to the service's parts, and types of parameters."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Path, Request
from pydantic import BeforeValidator

from dstl_service.composition import Parts
from dstl_service.wire import NAME_PATTERN
from storage.validation import NUMBER_MAX

_DIGITS = re.compile(r"[0-9]+")


def _in_digits(text: object) -> object:
    if isinstance(text, str) and not _DIGITS.fullmatch(text):
        raise ValueError("a number has only the digits 0 to 9, without sign, blanks or separators")
    return text


IN_DIGITS = BeforeValidator(_in_digits)
"""Validator of numbers in paths and queries: Pydantic alone also accepts `1_0`, `+5`, ` 5` and `5.0`."""


ANSWERED_BEFORE = "`fast_path.FastPath` answers this request; its route is only a declaration for the OpenAPI document"
"""Raised by routes that are never called."""


async def get_parts(request: Request) -> Parts:
    """Return the parts of the application's service. A coroutine, since FastAPI runs plain functions in a thread."""
    parts: Parts = request.app.state.parts
    return parts


ServiceParts = Annotated[Parts, Depends(get_parts)]
JobName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the job.")]
CheckpointId = Annotated[int, IN_DIGITS, Path(ge=0, le=NUMBER_MAX, description="Checkpoint id: Spark's batch id.")]
