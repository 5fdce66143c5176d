"""
Leaves the values of a sink's options out of what its library says. No I/O.

A library quotes a value that it refuses, and its errors reach logs, the user and those who see the query. The value may
be a secret that was given to the wrong option. So an error tells which option is wrong, and never what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from storage.errors import InvalidInputError

_HIDDEN = "…"
_CHARS_MIN = 4
_BEGINNING_CHARS = 32
_NUMBER = re.compile("[0-9]{1,9}")
_WORDS = frozenset(
    [
        *("true", "false", "default", "require", "prefer", "allow", "disable", "verify-ca", "verify-full"),
        *("read-write", "read-only", "primary", "standby", "database", "scram-sha-256", "scram-sha-512"),
        *("plain", "gssapi", "oauthbearer", "oidc", "plaintext", "sasl_plaintext", "sasl_ssl", "etag"),
    ]
)
"""Values that the libraries have words for: no secrets, and their errors say with them what to do."""


def without_values(text: str, options: Mapping[str, Any], *, is_told: Callable[[str], bool]) -> str:
    """
    Return a text with … for each value of the options.

    Numbers and the libraries' own words stay, and so do values of fewer than 4 characters, which would be found
    everywhere.

    Args:
        text: What the library says.
        options: The options that it got.
        is_told: Whether an option of this name is a name or a place, which an error must tell.
    """
    told = {str(value) for name, value in options.items() if is_told(name)}
    values = {str(value) for name, value in options.items() if not is_told(name) and value is not None} - told
    known = {value for value in values if value.lower() in _WORDS or _NUMBER.fullmatch(value)}
    secrets = {value for value in values - known if len(value) >= _CHARS_MIN}
    for form in sorted({form for value in secrets for form in _forms(value)}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", _HIDDEN, text)
        if len(form) > _BEGINNING_CHARS and form[:_BEGINNING_CHARS] in text:  # a library cuts long texts off
            text = f"{text.partition(form[:_BEGINNING_CHARS])[0]}{_HIDDEN}"
    return text


def check_text(name: str, value: Any) -> None:
    """Raise `InvalidInputError` for an argument that is no text, without its value: options may have got there."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{name} must be a text, it is a {type(value).__name__}")


def _forms(value: str) -> Iterator[str]:
    """Yield a value as libraries write it."""
    yield value
    for quoted in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        yield quoted[1:-1]
        yield json.dumps(quoted[1:-1], ensure_ascii=False)[1:-1]  # an error within another one
