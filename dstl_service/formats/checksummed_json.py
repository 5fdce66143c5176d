"""
JSON documents with a checksum in front: ``{"checksum": …, "NAME": DOCUMENT}``, readable by a person.

Manifests and indexes of materializations have this form. Any changed byte is detected. No I/O.
"""

from __future__ import annotations

import json
from typing import Any

from storage.checksum import checksum64
from storage.errors import NewerFormatError
from storage.stored_json import parse_json


def seal(name: str, document: dict[str, Any], *, ensure_ascii: bool = True) -> bytes:
    """Return the bytes of an object that holds a document under this name."""
    body = json.dumps(document, separators=(",", ":"), ensure_ascii=ensure_ascii).encode()
    return b"".join((_head(body), _separator(name), body, b"}"))


def unseal(name: str, data: bytes, format_max: int, object_key: str) -> dict[str, Any]:
    """
    Return the document that was sealed under this name.

    Args:
        name: Name of the document.
        data: The object's bytes.
        format_max: The newest ``format`` of the document that this version reads.
        object_key: The object's key.

    Raises:
        NewerFormatError: The object is sound, and its format is newer.
        ValueError: Any byte differs from what was written.
        LookupError: The document has no format.
        TypeError: The content is not a document, or its format is not a number.
    """
    head, separator, rest = data.partition(_separator(name))
    if not separator or not rest.endswith(b"}"):
        raise ValueError(f"it is not a {name}, or is truncated")
    body = rest[:-1]
    if head != _head(body):
        raise ValueError("the checksum does not match the content")
    document: dict[str, Any] = parse_json(body)
    NewerFormatError.check(f"{name} {object_key}", document["format"], format_max, object_key=object_key)
    return document


def _head(body: bytes) -> bytes:
    return f'{{"checksum":"{checksum64(body):016x}"'.encode()


def _separator(name: str) -> bytes:
    return f',"{name}":'.encode()
