"""Names, bounds and field types shared by requests and responses. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from storage.errors import InvalidInputError
from storage.validation import KEY_GROUP_MAX, NAME_CHARS_MAX, NUMBER_MAX, validate_name

NOTE_OPERATOR = "_note"
"""
Operator name of notes: segments that record which checkpoint the sets of a segment object belong to; see
`dstl_service.formats.checkpoint_record`.
"""

NOTE_CHARS_MAX = 8 << 20
"""Length of the longest note that is sent to another service."""

JSON_BYTES_MAX = 32 << 20
"""Largest body of a request that is read as a whole."""
JSON_VALUES_MAX = 3_000_000
"""
Most values in such a body, by its commas and brackets; `REFS_MAX` change sets and the longest note have fewer. The
event loop waits while they are parsed.
"""
VALUE_BYTES = 100
"""Most memory that a value takes when it is parsed, however short it is."""
REFS_MAX = 100_000
"""Most change sets in one request: three for each partition at the highest parallelism."""
NAME = f"[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}"
NAME_PATTERN = f"^{NAME}$"
UID_PATTERN = r"^[0-9A-Za-z_-]{1,64}$"
URL_PATTERN = r"^https?://[A-Za-z0-9._:\[\]-]{1,300}(/[A-Za-z0-9._~/-]{0,300})?$"
"""URL of a service: without user, query or fragment."""


class Limits:
    """
    Bounds of a field: checked by the service, shown in the OpenAPI document, without cost for the client.

    Args:
        bounds: Keys of pydantic's core schemas: `ge`, `le`, `min_length`, `max_length`, `pattern`, `strict`;
            `fail_fast` for long lists: collecting the errors of all items takes minutes, and the first one suffices.
    """

    def __init__(self, **bounds: Any) -> None:
        self._bounds = bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), **self._bounds}


Number: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=NUMBER_MAX)]
Partition: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=KEY_GROUP_MAX)]
Parallelism: TypeAlias = Annotated[int, Limits(strict=True, ge=1, le=KEY_GROUP_MAX + 1)]
Port: TypeAlias = Annotated[int, Limits(strict=True, ge=0, le=65535)]
HostName: TypeAlias = Annotated[str, Limits(pattern=r"^[A-Za-z0-9._:%-]{1,255}$")]
Flag: TypeAlias = Annotated[bool, Limits(strict=True)]
Name: TypeAlias = Annotated[str, Limits(pattern=NAME_PATTERN)]
Uid: TypeAlias = Annotated[str, Limits(pattern=UID_PATTERN)]
Url: TypeAlias = Annotated[str, Limits(pattern=URL_PATTERN)]
Checksum: TypeAlias = Annotated[str, Limits(pattern=r"^[0-9a-f]{16}$")]
ShortText: TypeAlias = Annotated[str, Limits(max_length=1000)]


def validate_operator(name: Any) -> str:
    """Return `name` if it is a valid operator name; `InvalidInputError` if it is malformed or reserved."""
    if validate_name("operator", name).startswith(NOTE_OPERATOR):
        raise InvalidInputError(
            f"operator name {name!r} is reserved; choose one that does not begin with {NOTE_OPERATOR}"
        )
    return str(name)
