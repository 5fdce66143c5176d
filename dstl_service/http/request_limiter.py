"""
Limit of requests in progress, so that no job takes all connections of a service.

A connection whose request is being answered, or whose body is awaited, is not evicted for a newer one (see
`connections`). The requests of one job occupy at most half of the connections, those of the next job half of the rest,
and so on (`dstl_service.process.shares`); a quarter is kept for jobs without a request. Owned by the event loop.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service.http.access_middleware import job_of
from dstl_service.http.errors import CLOSE, error_response, log_refusal
from dstl_service.process.shares import shares_of
from storage.errors import OverloadedError


class RequestPlaces:
    """
    ASGI middleware that counts requests in progress; one beyond its job's share gets 429, and its connection is closed.

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
