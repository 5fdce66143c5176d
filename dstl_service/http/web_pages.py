"""
Keeps web pages out: what a browser on this host sends for a page that somebody else wrote.

A page may send requests to any address, loopback included, and a page whose name leads to this host may read the
answers. No program that talks to a service is a browser, so what only browsers send is refused. Pure.
"""

from __future__ import annotations

import re

from storage.errors import InvalidInputError, UnauthorizedError

_HOST = re.compile(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?")
# What a page may send without asking the service before ("simple" requests); nothing here is written so.
_PAGE_TYPES = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")


def refusal(
    method: str, host: bytes | None, origin: bytes | None, content_type: bytes | None, hosts: frozenset[str] | None
) -> tuple[int, InvalidInputError | UnauthorizedError] | None:
    """
    Return status and error for a request that a web page may have sent, None for any other.

    Args:
        method: The request's.
        host: Its header, as are the next two.
        origin: Only browsers send one.
        content_type: Of its body.
        hosts: The names under which this service may be asked for; None: any, since a token is asked for as well.
    """
    if origin is not None:
        return 403, UnauthorizedError("requests of web pages are not answered: this one has an Origin")
    if hosts is not None and host is not None and host_name(host) not in hosts:
        return 403, UnauthorizedError(
            "this service is not asked for under that Host; if it has the name, let the setting allowed_hosts say so, "
            "or set a token"
        )
    if method not in ("GET", "HEAD") and content_type is not None:
        kind = content_type.split(b";")[0].strip().lower()
        if kind in _PAGE_TYPES:
            return 415, InvalidInputError("a body here is application/json, or application/octet-stream")
    return None


def host_name(host: bytes) -> str:
    """Return the name in a ``Host`` header, without the port."""
    found = _HOST.fullmatch(host.decode("latin-1").strip())
    return "" if found is None else (found[1] or found[2] or "").lower().rstrip(".")
