"""
Memory for bodies that are read as a whole and are not whole yet: so much in all, of which each job leaves half.

One job's bodies may take half, those of the next one half of what is left, and so on (`dstl_service.process.shares`):
however many jobs send slowly, something is left for the next one's. The largest body fits beside two such jobs.

A body of usual size passes uncounted: it is with the next pieces that the socket delivers. Bodies that are streamed
have room of their own, see `dstl_service.intake.in_flight_limiter`.
"""

from __future__ import annotations

import re
from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.access_middleware import is_streamed
from dstl_service.http.errors import CLOSE
from dstl_service.process.shares import Shares
from dstl_service.wire import NAME

UNCOUNTED_BYTES_MAX = 64 * 1024
_JOB = re.compile(rf"/v1/jobs/({NAME})(?:/|$)")


class BodyRoom:
    """
    ASGI middleware that counts what has come of bodies, and refuses what would pass the limit: ask again later.

    Args:
        app: What is asked.
        bytes_max: How much all bodies may take; at least twice as much as the largest.
    """

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        # Nothing is kept for newcomers: a share of bytes can be as small as need be.
        self._shares = Shares(bytes_max, 1, 0)
        self._held: Counter[str] = Counter()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What unfinished bodies take."""
        return self._held_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] == "GET" or not _is_large(scope):
            await self._app(scope, receive, send)
            return
        found = _JOB.match(scope["path"])
        job, held_bytes = found[1] if found else "", 0

        def hold(size_bytes: int) -> None:
            nonlocal held_bytes
            held_bytes += size_bytes
            self._held_bytes += size_bytes
            self._held[job] += size_bytes
            if not self._held[job]:
                del self._held[job]

        async def receive_counted() -> Message:
            message = await receive()
            size_bytes = len(message.get("body", b""))
            is_share = self._shares.admits(self._held[job], size_bytes, self._shares.total - self._held_bytes)
            hold(size_bytes)
            if not is_share:
                raise HTTPException(429, "too much of other requests is arriving; send it again", CLOSE)
            if not message.get("more_body", False):
                hold(-held_bytes)
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            hold(-held_bytes)


def _is_large(scope: Scope) -> bool:
    if is_streamed(scope["method"], scope["path"]):
        return False
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    return length is None or int(length) > UNCOUNTED_BYTES_MAX
