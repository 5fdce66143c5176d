"""
HTTP/1.1 as uvicorn speaks it, with what it lacks.

What may be sent before and behind a request's body is bounded, and so is what may wait behind a request: uvicorn's fast
parser has no limit for headers, nor for those that follow a body in chunks. `connections` bounds how many clients there
are and how slow they may be. And an answer is written to its connection at once: uvicorn writes head and body apart,
which costs a system call more than necessary, and wakes the client twice, for each of the thousands of change sets of a
second.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dstl_service.http.connections import Connections, Endable, Phase

HEAD_BYTES_MAX = 64 * 1024
"""The longest request line with all headers, and the most that may come beside a body's own bytes; what the socket
delivers at once behind a body may come on top."""

HEADERS_MAX = 128
"""So many headers a request may have. The memory of one is many times its bytes where these are few."""

PIPELINED_MAX = 16
"""Requests that may wait behind the one that is answered. No usual client sends any."""


class GatheredWrites:
    """A transport that writes together what is written to it in one turn of the event loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write at the end of this turn."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        """Close when all is written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 as uvicorn speaks it; a request that passes a bound is refused, and its connection closed."""

    guard: Connections | None = None
    """What bounds all connections of a server; set for each server's own class by `protocol_of`."""

    handshake: Endable | None = None
    """What stood for this connection before; set by who made it."""

    _phase = Phase.HEAD
    _heads = 0
    _body_bytes = 0
    _beside_body_bytes = 0
    _is_counting = False
    _delivered_body_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(GatheredWrites(transport, self.loop))  # type: ignore[arg-type]  # as good as one
        if self.guard is not None and not self.guard.admit(self, self.handshake):
            self.refuse(503, "Too many connections; try again later.", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        if self.guard is not None:
            self.guard.forget(self)
        super().connection_lost(exc)

    @property
    def phase(self) -> Phase:
        """What the connection's client has to send next."""
        return self._phase

    @property
    def heads(self) -> int:
        """How many requests have begun whose head is whole."""
        return self._heads

    @property
    def body_bytes(self) -> int:
        """How much of the body has come that the client is sending."""
        return self._body_bytes

    @property
    def is_held_back(self) -> bool:
        """Say whether it is this service that reads nothing more for now."""
        return self.flow.read_paused

    @property
    def is_answering(self) -> bool:
        """Say whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def unread_bytes(self) -> int:
        """How much of an answer waits for its client, as more than is usual does; else 0."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def on_message_begin(self) -> None:
        self._phase = Phase.HEAD
        self._count_anew()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not Phase.HEAD:
            return  # what follows a body says nothing that is heeded here, and is not kept
        if len(self.headers) >= HEADERS_MAX:
            raise ValueError  # to the parser, which ends with an error
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._phase = Phase.BODY
        self._heads += 1
        self._body_bytes = 0
        self._count_anew()
        if len(self.pipeline) >= PIPELINED_MAX:
            self.transport.abort()  # answers must come in order, so there is none for this one
        elif not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._delivered_body_bytes += len(body)
        self._count_anew()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._phase = Phase.NOTHING
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._is_counting = True
        self._delivered_body_bytes = 0
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # goes on as a usual request: nothing else is spoken here
            self._log("malformed request", "an upgrade was asked for")
        except httptools.HttpParserError as error:
            self._log("malformed request", type(error).__name__)
            self.refuse(400, f"Invalid HTTP request received, or one of more than {HEADERS_MAX} headers.")
            return
        # Where a count began in these bytes is not known; a head has at most those that are no body's.
        if (self._is_counting and self._phase is not Phase.NOTHING) or self._phase is Phase.HEAD:
            self._beside_body_bytes += len(data) - self._delivered_body_bytes
            if self._beside_body_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
                self._log("malformed request", "too much beside its body")
                self.refuse(
                    400, f"The head of a request has at most {HEAD_BYTES_MAX} bytes, and so has what follows it."
                )

    def refuse(self, status: int, message: str, headers: str = "") -> None:
        """Answer what no application has to see, unless that would be taken for another answer, and close."""
        is_next = self._phase is Phase.BODY and not self.cycle.response_started if self.is_answering else True
        if is_next and not self.pipeline:
            head = f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(message)}\r\n{headers}"
            answer = f"{head}connection: close\r\n\r\n{message}"
            self.transport.write(STATUS_LINE[status] + answer.encode("ascii"))
        if self.flow.write_paused:
            self.transport.abort()  # who does not read what it has asked for reads no refusal either
        self.transport.close()
        if self.is_answering:
            self.cycle.disconnected = True  # the application has nobody to answer any more
            self.cycle.message_event.set()

    def end(self) -> None:
        """Break the connection off; whoever waits for nothing sends its next request by another one."""
        self.transport.abort()

    def _log(self, event: str, reason: str) -> None:
        if self.guard is not None:
            self.guard.log(event, self, reason)

    def _count_anew(self) -> None:
        self._beside_body_bytes = 0
        self._is_counting = False


def protocol_of(guard: Connections) -> type[BoundedHttpProtocol]:
    """Return the protocol of a server whose connections are bounded together."""
    return type("GuardedHttpProtocol", (BoundedHttpProtocol,), {"guard": guard})
