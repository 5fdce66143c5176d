"""
Refuses requests that a browser on this host sends on behalf of a foreign web page.

A page can send requests to any address, loopback included, and by DNS rebinding a page can read the answers. No client
of the service is a browser, so requests that only browsers send are refused. Pure.
"""

from __future__ import annotations

import re

from storage.errors import InvalidInputError, UnauthorizedError

_HOST = re.compile(r"\[([^\]]*)\](?::\d*)?|([^:]*)(?::\d*)?")
# Types that a page may send without a CORS preflight ("simple" requests); no route takes them.
_PAGE_TYPES = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")


def refusal(
    method: str,
    host: bytes | None,
    origin: bytes | None,
    content_type: bytes | None,
    hosts: frozenset[str] | None,
    fetch_site: bytes | None = None,
) -> tuple[int, InvalidInputError | UnauthorizedError] | None:
    """
    Return status and error for a request that a web page may have sent; None for any other.

    Args:
        method: The request's method.
        host: Its ``Host`` header, or None.
        origin: Its ``Origin`` header; only browsers send one.
        content_type: Its ``Content-Type`` header, or None.
        hosts: Accepted host names; None accepts any, for a Unix socket or where a token is needed.
        fetch_site: Its ``Sec-Fetch-Site`` header; only browsers send one, also with a page's GET, which has no origin.
    """
    if origin is not None:
        return 403, UnauthorizedError("requests of web pages are refused: this one has an Origin header; send none")
    if fetch_site is not None and fetch_site != b"none":  # none: the user typed the address
        return 403, UnauthorizedError("requests of web pages are refused: this one has Sec-Fetch-Site; send none")
    if hosts is not None and host is not None and host_name(host) not in hosts:
        return 403, UnauthorizedError(
            "the Host header names none of this service's hosts; if the name is right, add it to the setting "
            "allowed_hosts, or set a token"
        )
    if method not in ("GET", "HEAD") and content_type is not None:
        kind = content_type.split(b";")[0].strip().lower()
        if kind in _PAGE_TYPES:
            return 415, InvalidInputError("the body must have the type application/json or application/octet-stream")
    return None


def host_name(host: bytes) -> str:
    """Return the name in a ``Host`` header without the port, in lower case; empty if it is malformed."""
    found = _HOST.fullmatch(host.decode("latin-1").strip())
    return "" if found is None else (found[1] or found[2] or "").lower().rstrip(".")
