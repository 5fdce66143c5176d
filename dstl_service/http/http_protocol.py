"""
uvicorn's HTTP/1.1 protocol with bounds and gathered writes.

Headers, trailers and pipelined requests are bounded: uvicorn's fast parser limits neither headers nor the trailers of a
chunked body. `connections` bounds the number of clients and how slow they may be. Head and body of an answer are
written together: uvicorn writes them apart, which costs one more system call and a second wake-up of the client for
each of thousands of change sets per second.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dstl_service.http.connections import Connections, Endable, Phase

HEAD_BYTES_MAX = 64 * 1024
"""Largest request line with all headers, and most bytes besides the body's own, such as trailers; what one socket read
delivers after a body may exceed it."""

HEADERS_MAX = 128
"""Most headers of a request. A short header takes many times its bytes in memory."""

PIPELINED_MAX = 16
"""Most pipelined requests that wait while one is answered. Usual clients send none."""


class GatheredWrites:
    """A transport that gathers all writes of one event-loop turn into one."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write at the end of the event-loop turn."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        """Flush, then close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol; a request that exceeds a bound is refused, and its connection is closed."""

    guard: Connections
    """Bounds all connections of a server; `protocol_of` sets it on each server's own class."""

    handshake: Endable | None = None
    """The handshake that counted for this connection before; set by the creator of the protocol."""

    phase = Phase.HEAD
    """The next message of the client."""
    heads = 0
    """Number of request heads received in full."""
    body_bytes = 0
    """Received bytes of the body that the client is sending."""

    _beside_body_bytes = 0
    _is_counting = False
    _delivered_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(GatheredWrites(transport, self.loop))  # type: ignore[arg-type]  # as good as one
        if not self.guard.admit(self, self.handshake):
            self.refuse(503, "Too many connections; try again later.", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.forget(self)
        super().connection_lost(exc)

    @property
    def is_held_back(self) -> bool:
        """Say whether this service has paused reading."""
        return self.flow.read_paused

    @property
    def is_answering(self) -> bool:
        """Say whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def unread_bytes(self) -> int:
        """Unsent bytes of answers while writing is paused, as the client reads too slowly; else 0."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def on_message_begin(self) -> None:
        self.phase = Phase.HEAD
        self._count_anew()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is not Phase.HEAD:
            return  # trailers are ignored and not kept
        if len(self.headers) >= HEADERS_MAX:
            raise ValueError  # makes the parser fail
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.phase = Phase.BODY
        self.heads += 1
        self.body_bytes = 0
        self._count_anew()
        if len(self.pipeline) >= PIPELINED_MAX:
            self.transport.abort()  # answers must stay in order, so this request cannot be answered
        elif not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        self._delivered_body_bytes += len(body)
        self._count_anew()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.phase = Phase.NOTHING
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_counting = True
        self._delivered_body_bytes = 0
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # handled as a plain request: no other protocol is supported
            self.guard.log("malformed request", self, "it asks for a protocol upgrade, which is ignored")
        except httptools.HttpParserError as error:
            self.guard.log("malformed request", self, type(error).__name__)
            self.refuse(400, f"The request is malformed HTTP, or has more than {HEADERS_MAX} headers.")
            return
        # The start of a head within these bytes is unknown; the head has at most all bytes outside the body.
        if (self._is_counting and self.phase is not Phase.NOTHING) or self.phase is Phase.HEAD:
            self._beside_body_bytes += len(data) - self._delivered_body_bytes
            if self._beside_body_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self.guard.log("malformed request", self, "too many bytes outside its body")
                self.refuse(400, f"The head of a request has at most {HEAD_BYTES_MAX} bytes, and so have its trailers.")

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Refuse without the application, unless the client would take the answer for another request's; close."""
        is_next = self.phase is Phase.BODY and not self.cycle.response_started if self.is_answering else True
        if is_next and not self.pipeline:
            head = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(message)}\r\n{headers}"
            answer = f"{head}connection: close\r\n\r\n{message}"
            self.transport.write(STATUS_LINE[status] + answer.encode("ascii"))
        if self.flow.write_paused:
            self.transport.abort()  # a client that does not read its answers reads no refusal either
        self.transport.close()
        if self.is_answering:
            self.cycle.disconnected = True  # the application's answer has no receiver any more
            self.cycle.message_event.set()

    def end(self) -> None:
        """Abort the connection; an idle client opens another one for its next request."""
        self.transport.abort()

    def _count_anew(self) -> None:
        self._beside_body_bytes = 0
        self._is_counting = False


def protocol_of(guard: Connections) -> type[BoundedHttpProtocol]:
    """Return a protocol class whose connections share the bounds of `guard`."""
    return type("GuardedHttpProtocol", (BoundedHttpProtocol,), {"guard": guard})
