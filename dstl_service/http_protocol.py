"""
HTTP/1.1 as uvicorn speaks it, with two things that it lacks.

What may be sent before a request is known is bounded: uvicorn's fast parser itself has no limit for headers.
And an answer is written to its connection at once: uvicorn writes head and body apart, which costs a system call more
than necessary, and wakes the client twice, for each of the thousands of change sets of a second.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 * 1024
"""The longest request line with all headers; what the socket delivers at once may come on top."""


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
    """HTTP/1.1 as uvicorn speaks it; a request whose head does not end within HEAD_BYTES_MAX is refused and cut off."""

    _head_is_open = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(GatheredWrites(transport, self.loop))  # type: ignore[arg-type]  # as good as one

    def on_message_begin(self) -> None:
        self._head_is_open = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_open = False
        self._head_bytes = 0
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._head_is_open:
            return
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response(f"The head of a request has at most {HEAD_BYTES_MAX} bytes.")
