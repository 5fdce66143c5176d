"""Bounds of stored values, the checks that every value passes, and that of a store's endpoint. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from storage.errors import InvalidInputError

KEY_GROUP_MAX = 32_767
"""The largest key group, and with it the largest partition number."""

NUMBER_MAX = 2**53 - 1
"""The largest epoch, attempt, checkpoint id and sequence number."""

COUNT_MAX = 2**31 - 1
"""The largest number of changes in one segment."""

CHECKSUM_MAX = 2**64 - 1

SEGMENT_BYTES_MAX = 2**30
"""The largest payload of one segment: 1 GiB."""

OBJECT_BYTES_MAX = 2**31 - 1
"""The largest segment object: below 2 GiB, so that no reader needs more than a signed 32-bit length."""

NAME_CHARS_MAX = 128
_SHOWN_CHARS_MAX = 80

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_ENDPOINT = re.compile(r"https?://[^\s@?#]+")


def validate_name(kind: str, value: Any) -> str:
    """
    Return `value` if it may name a job, an operator or a host.

    Names become parts of object keys and of paths: 1-128 characters of [A-Za-z0-9._-], the first one not a dot.

    Args:
        kind: The kind of thing, for the message: "job", "operator", "host".
        value: The name.

    Raises:
        InvalidInputError: The name is not allowed; the message gives the rule.
    """
    if not isinstance(value, str) or len(value) > NAME_CHARS_MAX or not _NAME.fullmatch(value):
        raise InvalidInputError(
            f"{kind} name {shorten(value)} is not allowed; use "
            f"1-{NAME_CHARS_MAX} characters of [A-Za-z0-9._-], the first one not a dot"
        )
    return value


def check_int(name: str, value: Any, value_max: int) -> None:
    """Raise `InvalidInputError` unless `value` is an int (not a bool) within 0..value_max."""
    if type(value) is not int or not 0 <= value <= value_max:
        raise InvalidInputError(f"{name} must be a whole number within 0..{value_max}, not {shorten(value)}")


def check_fields(kind: str, data: Any, expected: frozenset[str], optional: frozenset[str] = frozenset()) -> None:
    """Raise `InvalidInputError` unless `data` has all expected fields and no others than the optional ones."""
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{kind} must be an object with fields, not {shorten(data)}")
    if data.keys() - optional != expected:
        missing = ", ".join(sorted(expected - data.keys())) or "none"
        unknown = ", ".join(sorted(map(str, data.keys() - expected - optional))) or "none"
        raise InvalidInputError(f"{kind} has unexpected fields: missing {missing}; unknown {unknown}")


def is_endpoint(url: str) -> bool:
    """Return whether a URL is ``http(s)://host:port``, without parts in which secrets are passed: errors name it."""
    return _ENDPOINT.fullmatch(url) is not None


def shorten(value: object) -> str:
    """Return a value as text for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
