"""The bounds of a connection apart from request bodies: the real parser and protocol on an in-memory transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from dstl_service.http.connections import Connections
from dstl_service.http.http_protocol import HEAD_BYTES_MAX, HEADERS_MAX, PIPELINED_MAX, BoundedHttpProtocol, protocol_of
from dstl_service.process.logs import LogLimiter
from dstl_service.settings import HttpSettings
from storage.testing import FakeClock

pytestmark = pytest.mark.timeout(180)

BLOCK = 256 * 1024
CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """The service's end of a connection; records what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: Any) -> None:
        """Record bytes."""
        self.written += bytes(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Record bytes in parts."""
        self.written += b"".join(list_of_data)

    def close(self) -> None:
        """Close."""
        self.is_closed = True

    def abort(self) -> None:
        """Abort."""
        self.is_closed = self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes."""
        return len(self.written)

    def is_closing(self) -> bool:
        """Tell whether it was closed."""
        return self.is_closed

    def pause_reading(self) -> None:
        """Do nothing: a test decides what arrives."""

    resume_reading = pause_reading

    @property
    def statuses(self) -> list[int]:
        """The statuses of the answers."""
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the size of the body and the names of the headers."""
    size, more = 0, scope["type"] == "http"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = f"{size} {len(scope['headers'])}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


def connected(story: Callable[[BoundedHttpProtocol, Wire], Awaitable[None]]) -> None:
    """Run a story of one connection."""

    async def tell() -> None:
        config = uvicorn.Config(echo, log_config=None, ws="none", lifespan="off")
        guard = Connections(HttpSettings(10, body_bytes_per_s_min=100), LogLimiter(FakeClock()))
        wire = Wire()
        protocol = protocol_of(guard)(config, ServerState(), {})
        protocol.connection_made(wire)
        await story(protocol, wire)
        protocol.connection_lost(ConnectionResetError())
        await asyncio.gather(*protocol.tasks)

    asyncio.run(asyncio.wait_for(tell(), 60))


async def settled() -> None:
    """Let the application answer."""
    for _ in range(10):
        await asyncio.sleep(0)


def send_while_open(protocol: BoundedHttpProtocol, wire: Wire, block: bytes, times: int) -> int:
    """Send the same bytes this many times, or until the connection is closed; return how many were accepted."""
    sent = 0
    while not wire.is_closed and sent < times * len(block):
        protocol.data_received(block)
        sent += len(block)
    return sent


@pytest.mark.parametrize("is_one", [True, False], ids=["one", "many"])
def test_trailers_are_bounded(is_one: bool) -> None:
    """C3: trailers of a chunked body are counted, many headers or one, and none of them is kept."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(CHUNKED + b"1\r\nx\r\n0\r\n" + (b"name: " if is_one else b""))
        block = b"x" * 1000 if is_one else b"trailer: xxxxxxxxxx\r\n" * 50
        sent = send_while_open(protocol, wire, block, 200)

        assert wire.is_closed
        assert sent <= HEAD_BYTES_MAX + len(block)
        assert len(protocol.headers) == 2

    connected(story)


def test_trailers_in_one_block_are_not_kept() -> None:
    """C3: trailers that arrive in one block with their body are not headers of the request."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(CHUNKED + b"1\r\nx\r\n0\r\nauthorization: Bearer other\r\n\r\n")
        await settled()

        assert wire.written.endswith(b"1 2")
        assert not wire.is_closed

    connected(story)


def test_chunks_of_a_body_are_no_trailers() -> None:
    """A long body in small chunks is accepted, however much its frames add."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(CHUNKED)
        for _ in range(HEAD_BYTES_MAX // 10):
            protocol.data_received(b"00000000001\r\nx\r\n")
            await asyncio.sleep(0)
        protocol.data_received(b"0\r\n\r\n")
        await settled()

        assert wire.statuses == [200]

    connected(story)


def test_request_after_large_body_is_answered() -> None:
    """C3: a request in one block with the end of a large body is not a long head."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        protocol.data_received(head % 100_000 + b"x" * 100_000 + b"GET /next HTTP/1.1\r\n")
        await settled()
        protocol.data_received(b"host: x\r\n\r\n")
        await settled()

        assert wire.statuses == [200, 200]

    connected(story)


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_endless_head_is_refused(start: bytes) -> None:
    """A head that does not end is refused, also after another request."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(start + b"GET / HTTP/1.1\r\nx: ")
        await settled()
        sent = send_while_open(protocol, wire, b"x" * 1000, 10_000)

        assert sent <= HEAD_BYTES_MAX + 1000
        assert wire.statuses[-1] == 400

    connected(story)


def test_head_in_one_block_is_refused() -> None:
    """A head that does not end is refused even if the socket delivers more of it at once than the limit."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\nx: " + b"x" * HEAD_BYTES_MAX)

        assert (wire.statuses, wire.is_closed) == ([400], True)

    connected(story)


def test_headers_are_so_many_at_most() -> None:
    """Empty headers take a hundred times their bytes in memory, so their number is limited even without a token."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * HEADERS_MAX + b"\r\n")
        await settled()
        assert wire.written.endswith(b"0 %d" % HEADERS_MAX)
        protocol.data_received(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 10_000)

        assert (wire.statuses, wire.is_closed) == ([200, 400], True)
        assert len(protocol.headers) == HEADERS_MAX

    connected(story)


def test_client_that_reads_nothing_is_broken_off() -> None:
    """B12: a client that reads nothing is aborted: a close that waits until all is sent would never end."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await settled()
        assert protocol.unread_bytes == 0
        protocol.pause_writing()
        assert protocol.unread_bytes > 0
        protocol.refuse(408, "Nothing was read.")

        assert wire.is_aborted

    connected(story)


def test_waiting_requests_are_bounded() -> None:
    """B12: the number of requests sent before the first is answered is limited."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)

        assert wire.is_closed
        assert len(protocol.pipeline) <= PIPELINED_MAX

    connected(story)


def test_malformed_requests_are_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """C10: malformed requests of strangers are logged neither one by one nor in full."""

    async def story(protocol: BoundedHttpProtocol, wire: Wire) -> None:
        for _ in range(50):
            protocol.data_received(b"\x00" * 1000)
            wire.is_closed = False
        assert set(wire.statuses) == {400}

    with caplog.at_level(logging.DEBUG):
        connected(story)
    (line,) = (record for record in caplog.records if record.name.startswith(("dstl", "uvicorn")))
    assert len(str(vars(line))) < 2000
