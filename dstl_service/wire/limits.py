"""Names, bounds and types of fields that requests and responses share. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from storage.errors import InvalidInputError
from storage.model import KEY_GROUP_MAX, NAME_CHARS_MAX, NUMBER_MAX, validate_name

NOTE_OPERATOR = "_note"
"""
Names the segments by which a segment object says which checkpoint its sets belong to; see
`dstl_service.formats.checkpoint_record`.
"""

NOTE_CHARS_MAX = 8 << 20
"""The longest note that is sent to another service."""

JSON_BYTES_MAX = 32 << 20
"""The largest body of a request that is read as a whole."""
REFS_MAX = 100_000
"""The most change sets that one request may name: three for each of the most partitions."""
NAME = f"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}"
NAME_PATTERN = f"^{NAME}$"
UID_PATTERN = r"^[0-9A-Za-z_-]{1,64}$"
URL_PATTERN = r"^https?://[A-Za-z0-9._:\[\]-]{1,300}(/[A-Za-z0-9._~/-]{0,300})?$"
"""Where a service is reached: without user, query or fragment."""


class Limits:
    """
    Bounds of a field: checked by the service, shown in the OpenAPI document, and free of charge for the client.

    Args:
        bounds: In the words of pydantic's core schemas: `ge`, `le`, `min_length`, `max_length`, `pattern`, `strict`;
            `fail_fast` for what may be long: the errors of all items take minutes, and the first one tells.
    """

    def __init__(self, **bounds: Any) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), **self._bounds}


Number: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=NUMBER_MAX)]
Partition: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=KEY_GROUP_MAX)]
Parallelism: TypeAlias = Annotated[int, Limits(strict=True, ge=1, le=KEY_GROUP_MAX + 1)]
Flag: TypeAlias = Annotated[bool, Limits(strict=True)]
Name: TypeAlias = Annotated[str, Limits(pattern=NAME_PATTERN)]
Uid: TypeAlias = Annotated[str, Limits(pattern=UID_PATTERN)]
Url: TypeAlias = Annotated[str, Limits(pattern=URL_PATTERN)]
Checksum: TypeAlias = Annotated[str, Limits(pattern=r"^[0-9a-f]{16}$")]
ShortText: TypeAlias = Annotated[str, Limits(max_length=1000)]


def validate_operator(name: Any) -> str:
    """Return `name` if an operator may have it; `InvalidInputError` for a malformed or a reserved one."""
    if validate_name("operator", name).startswith(NOTE_OPERATOR):
        raise InvalidInputError(
            f"operator name {name!r} is reserved: choose one that does not begin with {NOTE_OPERATOR}"
        )
    return str(name)
