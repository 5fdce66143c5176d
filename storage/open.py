"""Opens a store by its URL. S3 stores are imported on demand, so boto3 is optional."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from storage.errors import InvalidInputError
from storage.local_store import LocalStore
from storage.memory_store import shared_memory_store
from storage.object_store import ObjectStore

_KNOWN = "file:///absolute/path, s3://bucket/prefix, memory://name"


def open_store(url: str, **options: Any) -> ObjectStore:
    """
    Open the store of a URL. Makes no connection; `check_writable` does.

    Args:
        url: `file:///absolute/path`, `s3://bucket/prefix` or `memory://name` (one per name and process).
        options: Options of the store's class, for example `endpoint_url` of `S3Store`.

    Raises:
        InvalidInputError: The kind of URL or an option is unknown; the message lists the known ones.
        UnavailableError: The folder of a `file` URL cannot be made.
    """
    parts = urlsplit(url)
    # A password with a / ends the place of the bucket, which would be the user's name.
    if parts.query or parts.fragment or "@" in parts.netloc or (parts.scheme == "s3" and ":" in parts.netloc):
        raise InvalidInputError(f"a store URL must not have a query, fragment or credentials; use {_KNOWN}")
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return _call(LocalStore, (unquote(parts.path),), options)
    if parts.scheme == "s3" and parts.netloc:
        return _call(_s3_store_class(), (parts.netloc, parts.path.strip("/")), options)
    if parts.scheme == "memory" and parts.netloc and not parts.path.strip("/"):
        return _call(shared_memory_store, (parts.netloc,), options)
    if "@" in url:
        raise InvalidInputError(f"unknown store URL, which may have credentials; use {_KNOWN}")
    raise InvalidInputError(f"unknown store URL {url!r}; use {_KNOWN}{did_you_mean(url)}")


def did_you_mean(url: str) -> str:
    """Return the end of an error about an unknown store URL: what was meant, if it is a common mistake; else empty."""
    parts = urlsplit(url)
    if parts.scheme in ("s3a", "s3n") and parts.netloc:
        meant = f"s3{url[len(parts.scheme) :]}"
        return f". Did you mean {meant}? The service does not reach the bucket through Hadoop"
    if parts.scheme in ("", "file") and (path := f"{parts.netloc}{parts.path}".strip("/")):
        return f". Did you mean file:///{path}?" if url.startswith(("/", "file:")) else ""
    return ""


def is_same_storage(first: str, second: str) -> bool:
    """Say whether two store URLs name one place, as seen from this host; links are followed. Blocking."""
    return first == second or _place(first) == _place(second)


def _place(url: str) -> tuple[str, str, str]:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return parts.scheme, "", os.path.realpath(unquote(parts.path))
    return parts.scheme, parts.netloc, parts.path.strip("/")


def _s3_store_class() -> Callable[..., ObjectStore]:
    try:
        from storage.s3_store import S3Store
    except ImportError as error:
        raise InvalidInputError("S3 stores need boto3; install it: pip install 'boto3>=1.36'") from error
    return S3Store


def _call(make: Callable[..., ObjectStore], arguments: tuple[str, ...], options: dict[str, Any]) -> ObjectStore:
    parameters = inspect.signature(make).parameters.values()
    known = sorted(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InvalidInputError(f"unknown store options {', '.join(unknown)}; known are {', '.join(known) or 'none'}")
    return make(*arguments, **options)
