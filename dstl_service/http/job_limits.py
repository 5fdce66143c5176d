"""
Limits of what the requests of one job occupy: connections, and memory for incomplete bodies.

One job may take half of each, the next job half of the rest, and so on (`dstl_service.process.shares`): however many
jobs send slowly, the next one still finds room. Owned by the event loop.
"""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.access_middleware import is_streamed, job_of
from dstl_service.http.errors import CLOSE, error_response, log_refusal
from dstl_service.process.shares import Shares, shares_of
from storage.errors import OverloadedError

UNCOUNTED_BYTES_MAX = 64 * 1024


class RequestPlaces:
    """
    ASGI middleware that counts requests in progress; one beyond its job's share gets 429, and its connection is closed.

    A connection whose request is being answered, or whose body is awaited, is not evicted for a newer one (see
    `connections`). A quarter is kept for jobs without a request.

    Args:
        app: The next application.
        connections_max: Number of connections of the service.
    """

    def __init__(self, app: ASGIApp, connections_max: int) -> None:
        self._app = app
        self._shares = shares_of(connections_max)
        self._free = connections_max
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        job = job_of(scope["path"])
        if not self._shares.admits(self._held[job], 1, self._free):
            error = OverloadedError(f"{self._held[job]} requests of this job are in progress; send it again")
            log_refusal(scope, error)
            await error_response(error, headers=CLOSE)(scope, receive, send)
            return
        self._hold(job, 1)
        try:
            await self._app(scope, receive, send)
        finally:
            self._hold(job, -1)

    def _hold(self, job: str, places: int) -> None:
        self._free -= places
        self._held[job] += places
        if not self._held[job]:
            del self._held[job]


class BodyRoom:
    """
    ASGI middleware that counts received body bytes; a request that would exceed the limit gets 429.

    It counts bodies that are read as a whole; the largest fits beside those of two jobs that have their shares. A body
    of usual size is not counted: the next reads of the socket complete it. Streamed bodies have a limit of their own,
    see `dstl_service.intake.in_flight_limiter`.

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
