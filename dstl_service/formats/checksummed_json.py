"""
JSON documents with a checksum, readable by a person.

Manifests and indexes of materializations have it in front: ``{"checksum": …, "NAME": DOCUMENT}``. Any changed byte is
detected. Small objects, which earlier versions wrote without one and still read, have it as their last field:
``{…, "checksum": …}``. Any changed byte is detected, or does not change their meaning. No I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from storage.checksum import BytesLike, checksum64
from storage.errors import ContextValue, CorruptDataError, DstlError, NewerFormatError
from storage.stored_json import parse_json

_STAMP = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\Z')


@contextmanager
def reading(what: str, **context: ContextValue) -> Iterator[None]:
    """
    Read a document of the store in this context.

    Raises:
        NewerFormatError: A newer version wrote it.
        CorruptDataError: Anything else failed; says that `what` cannot be read.
    """
    try:
        yield
    except NewerFormatError:
        raise
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError, DstlError) as error:
        raise CorruptDataError(f"{what} cannot be read: {error}", **context) from error


def stamp(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a small object that holds a document, which is not empty and has no field ``checksum``."""
    body = json.dumps(document).encode()
    return b"".join((body[:-1], f', "checksum": "{checksum64(body):016x}"'.encode(), b"}"))


def unstamp(data: BytesLike) -> Any:
    """
    Return the document of a small object; that of an earlier version may have no checksum.

    Raises:
        ValueError: It is not JSON, or a byte differs from what was written.
    """
    body = bytes(data)
    if (found := _STAMP.search(body)) is not None:
        body = body[: found.start()] + b"}"
        if found[1] != f"{checksum64(body):016x}".encode():
            raise ValueError("the checksum does not match the content")
    return parse_json(body)


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
