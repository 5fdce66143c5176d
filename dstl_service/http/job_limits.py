"""
Limits of what the requests of one job occupy: connections, and memory for bodies and untaken answers.

One job may take half of each, the next job half of the rest, and so on (`dstl_service.process.shares`): however many
jobs send slowly, the next one still finds room. Owned by the event loop.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.access_middleware import VALUES, is_streamed, job_of
from dstl_service.http.errors import CLOSE, error_response, log_refusal
from dstl_service.process.shares import SharedRoom, Shares, shares_of
from dstl_service.wire import VALUE_BYTES
from storage.errors import OverloadedError

UNCOUNTED_BYTES_MAX = 64 * 1024

PARSED_BYTES_MAX = 1 << 30
"""Memory for the parsed bodies of requests in progress; those of one job may hold as much as stays free."""

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
    ASGI middleware that counts the bytes of bodies, and of what is parsed; a request beyond a limit gets 429.

    It counts bodies that are read as a whole; the largest fits beside those of two jobs that have their shares. The
    bytes of a body of usual size are not counted: the next reads of the socket complete it. What is parsed, which may
    be many times as large, is counted until the request ends: until its sets are durable, or its client has taken the
    answer. Streamed bodies have a limit of their own, see `dstl_service.intake.in_flight_limiter`.

    Args:
        app: The next application.
        bytes_max: Memory for all incomplete bodies; at least twice the largest body.
        parsed_bytes_max: Memory for all parsed bodies.
    """

    def __init__(self, app: ASGIApp, bytes_max: int, parsed_bytes_max: int = PARSED_BYTES_MAX) -> None:
        self._app = app
        # Nothing is reserved for newcomers: a share of bytes can be arbitrarily small.
        self.room = SharedRoom(Shares(bytes_max, 1, 0))
        """What the incomplete bodies of each job hold, in bytes."""
        self.parsed = SharedRoom(Shares(parsed_bytes_max, 1, 0))
        """What the parsed bodies of each job's requests in progress hold, in bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] == "GET" or is_streamed(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
            return
        job, is_large = job_of(scope["path"]), _is_large(scope)
        arrived_bytes = held_bytes = parsed_bytes = 0

        def let_go() -> None:
            nonlocal held_bytes
            self.room.give_back(job, held_bytes)
            held_bytes = 0

        async def receive_counted() -> Message:
            nonlocal arrived_bytes, held_bytes, parsed_bytes
            message = await receive()
            if message["type"] != "http.request":
                return message
            size_bytes = len(message.get("body", b""))
            arrived_bytes += size_bytes
            if is_large and not self.room.take(job, size_bytes):
                raise HTTPException(429, "too many bytes of other requests are arriving; send it again", CLOSE)
            held_bytes += size_bytes if is_large else 0
            if not message.get("more_body", False):
                let_go()
                parsed = arrived_bytes + VALUE_BYTES * scope.get(VALUES, 0)
                if not self.parsed.take(job, parsed):
                    raise HTTPException(429, "other requests of large bodies are in progress; send it again", CLOSE)
                parsed_bytes += parsed
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            let_go()
            self.parsed.give_back(job, parsed_bytes)


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
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    return length is None or int(length) > UNCOUNTED_BYTES_MAX
