"""
Limits of what the requests of one job occupy: connections, and memory for incomplete bodies and untaken answers.

One job may take half of each, the next job half of the rest, and so on (`dstl_service.process.shares`): however many
jobs send slowly, the next one still finds room. Owned by the event loop.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.access_middleware import is_streamed, job_of
from dstl_service.http.errors import CLOSE, error_response, log_refusal
from dstl_service.process.shares import SharedRoom, Shares, shares_of
from storage.errors import OverloadedError

UNCOUNTED_BYTES_MAX = 64 * 1024

ANSWERS_BYTES_MAX = 512 * 1024 * 1024
"""Memory for answers that their clients have not taken; those of one job may hold as much as stays free."""

_PIECE_BYTES = 1024 * 1024


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
        self._places = SharedRoom(shares_of(connections_max))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        job = job_of(scope["path"])
        if not self._places.take(job, 1):
            error = OverloadedError(f"{self._places.held_by(job)} requests of this job are in progress; send it again")
            log_refusal(scope, error)
            await error_response(error, headers=CLOSE)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.give_back(job, 1)


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
        self.room = SharedRoom(Shares(bytes_max, 1, 0))
        """What the bodies of each job hold, in bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] == "GET" or not _is_large(scope):
            await self._app(scope, receive, send)
            return
        job, held_bytes = job_of(scope["path"]), 0

        def let_go() -> None:
            nonlocal held_bytes
            self.room.give_back(job, held_bytes)
            held_bytes = 0

        async def receive_counted() -> Message:
            nonlocal held_bytes
            message = await receive()
            size_bytes = len(message.get("body", b""))
            if not self.room.take(job, size_bytes):
                raise HTTPException(429, "too many bytes of other requests are arriving; send it again", CLOSE)
            held_bytes += size_bytes
            if not message.get("more_body", False):
                let_go()
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            let_go()


class AnswerRoom:
    """
    ASGI middleware that counts answers that were made as a whole, until their clients have taken them.

    An answer that would exceed its job's share is dropped, and the request gets 429. Streams have a limit of their own,
    see `dstl_service.restore_service`, and small answers are not counted.

    Args:
        app: The next application.
        bytes_max: Memory for all such answers.
    """

    def __init__(self, app: ASGIApp, bytes_max: int = ANSWERS_BYTES_MAX) -> None:
        self._app = app
        self.room = SharedRoom(Shares(bytes_max, 1, 0))
        """What the answers of each job hold, in bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head: Message | None = None

        async def send_counted(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            begun, head = head, None
            if begun is not None and not message.get("more_body", False):
                await self._send_whole(scope, receive, send, begun, message)
                return
            if begun is not None:
                await send(begun)
            await send(message)

        await self._app(scope, receive, send_counted)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send, head: Message, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if len(body) <= UNCOUNTED_BYTES_MAX:
            await send(head)
            await send(message)
            return
        job = job_of(scope["path"])
        if not self.room.take(job, len(body)):
            error = OverloadedError("too many bytes of other answers wait for their clients; ask again")
            log_refusal(scope, error)
            await error_response(error)(scope, receive, send)
            return
        try:
            await send(head)
            for begin in range(0, len(body), _PIECE_BYTES):
                await send({**message, "body": body[begin : begin + _PIECE_BYTES], "more_body": True})
                await asyncio.sleep(0)  # the piece is written, so that the next one waits until this one is taken
            await send({**message, "body": b""})
        finally:
            self.room.give_back(job, len(body))


def _is_large(scope: Scope) -> bool:
    if is_streamed(scope["method"], scope["path"]):
        return False
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    return length is None or int(length) > UNCOUNTED_BYTES_MAX
