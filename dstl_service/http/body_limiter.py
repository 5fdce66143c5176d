"""
Memory limit for incomplete bodies of requests that are read as a whole.

The bodies of one job may take half, those of the next job half of the rest, and so on (`dstl_service.process.shares`):
however many jobs send slowly, the next job still finds memory. The largest body fits beside two such jobs.

A body of usual size is not counted: the next reads of the socket complete it. Streamed bodies have a limit of their
own, see `dstl_service.intake.in_flight_limiter`.
"""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.access_middleware import is_streamed, job_of
from dstl_service.http.errors import CLOSE
from dstl_service.process.shares import Shares

UNCOUNTED_BYTES_MAX = 64 * 1024


class BodyRoom:
    """
    ASGI middleware that counts received body bytes; a request that would exceed the limit gets 429.

    Args:
        app: The next application.
        bytes_max: Memory for all incomplete bodies; at least twice the largest body.
    """

    def __init__(self, app: ASGIApp, bytes_max: int) -> None:
        self._app = app
        # Nothing is reserved for newcomers: a share of bytes can be arbitrarily small.
        self._shares = Shares(bytes_max, 1, 0)
        self._held: Counter[str] = Counter()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held by incomplete bodies."""
        return self._held_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] == "GET" or not _is_large(scope):
            await self._app(scope, receive, send)
            return
        job, held_bytes = job_of(scope["path"]), 0

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
                raise HTTPException(429, "too many bytes of other requests are arriving; send it again", CLOSE)
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
