"""The bounds of a TLS port before the client is known: real sockets and handshakes, in one process."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Self

import pytest
import trustme
import uvicorn
import uvloop
from uvicorn.server import ServerState

from dstl_service.http.connections import Connections, Endable
from dstl_service.http.http_protocol import BoundedHttpProtocol, protocol_of
from dstl_service.http.tls_listener import TlsListener
from dstl_service.process.logs import LogLimiter
from dstl_service.settings import HttpSettings
from storage.testing import FakeClock
from tests.unit.dstl_service.http.test_http_bounds import echo

pytestmark = pytest.mark.timeout(180)

CONNECTIONS_MAX = 8
ASK = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Return a certificate authority."""
    return trustme.CA()


class Port:
    """A listening TLS socket and its parts."""

    def __init__(self, authority: trustme.CA, listener: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(context)
        self.trust = ssl.create_default_context()
        authority.configure_trust(self.trust)
        self.guard = Connections(HttpSettings(CONNECTIONS_MAX, body_bytes_per_s_min=100), LogLimiter(FakeClock()))
        self.socket = listener
        self.listener = TlsListener(listener, lambda: context, self._protocol, self.guard)
        self._config = uvicorn.Config(echo, log_config=None, ws="none", lifespan="off")
        self._state = ServerState()

    def _protocol(self, handshake: Endable) -> BoundedHttpProtocol:
        protocol = protocol_of(self.guard)(self._config, self._state, {})
        protocol.handshake = handshake
        return protocol

    async def silent(self) -> asyncio.StreamReader:
        """Connect, and send nothing afterwards."""
        reader, writer = await asyncio.open_connection(*self.socket.getsockname())
        self._kept.append(writer)
        return reader

    async def client(self) -> Client:
        """Connect as a client does."""
        streams = await asyncio.open_connection(*self.socket.getsockname(), ssl=self.trust, server_hostname="localhost")
        self._kept.append(streams[1])
        return Client(*streams)

    async def __aenter__(self) -> Self:
        self._kept: list[asyncio.StreamWriter] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        self.listener.close()
        await self.listener.wait_closed()
        for writer in self._kept:
            writer.transport.abort()
        await until(lambda: not self._state.connections)


class Client:
    """A well-behaved client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self) -> bytes:
        """Return the first line of an answer."""
        self._writer.write(ASK)
        head = await self._reader.readuntil(b"\r\n\r\n")
        await self._reader.readexactly(3)
        return head.partition(b"\r\n")[0]


class FewFiles(socket.socket):
    """A listening socket of a process that temporarily has no free file descriptor."""

    refusals = 0

    def accept(self) -> tuple[socket.socket, object]:
        """Accept, or raise the error."""
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def listening(
    authority: trustme.CA, story: Callable[[Port], Awaitable[None]], of: type[socket.socket] = socket.socket
) -> None:
    """Run a story against a port."""

    async def tell() -> None:
        async with Port(authority, listener) as port:
            await story(port)

    with ExitStack() as stack:
        listener = stack.enter_context(of())
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        runner.run(asyncio.wait_for(tell(), 120))


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the service has closed a connection that sends nothing."""
    with suppress(ConnectionResetError):
        assert await reader.read() == b""


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    while not condition():  # noqa: ASYNC110 - the code under test tells nobody
        await asyncio.sleep(0)


def test_silent_connections_are_bounded(authority: trustme.CA) -> None:
    """B12: most of many silent connections are closed at once, and current and later clients are served."""

    async def story(port: Port) -> None:
        before = await port.client()
        assert await before.ask() == b"HTTP/1.1 200 OK"
        silent = []
        for _ in range(5 * CONNECTIONS_MAX):
            silent.append(await port.silent())
            assert len(port.guard) <= CONNECTIONS_MAX
        behind = await port.client()
        assert await behind.ask() == b"HTTP/1.1 200 OK"
        assert await before.ask() == b"HTTP/1.1 200 OK"
        for reader in silent[: 4 * CONNECTIONS_MAX]:
            await ended(reader)

    listening(authority, story)


def test_silent_connection_is_ended_in_time(authority: trustme.CA) -> None:
    """B12: a handshake that does not end times out like a head that does not arrive."""

    async def story(port: Port) -> None:
        reader = await port.silent()
        await until(lambda: len(port.guard) == 1)
        port.guard.look(21.0)
        await ended(reader)
        assert len(port.guard) == 0

    listening(authority, story)


def test_place_is_free_when_a_handshake_fails(authority: trustme.CA, caplog: pytest.LogCaptureFixture) -> None:
    """A failed handshake, or a client that hangs up, is closed and no longer counted; one line says so."""

    async def story(port: Port) -> None:
        for _ in range(2 * CONNECTIONS_MAX):
            reader, writer = await asyncio.open_connection(*port.socket.getsockname())
            writer.write(ASK)
            await reader.read()
            writer.close()
        await until(lambda: len(port.guard) == 0)

    with caplog.at_level(logging.WARNING, "dstl_service"):
        listening(authority, story)
    assert [(record.message, vars(record)["reason"]) for record in caplog.records] == [
        ("handshake failed", "HTTP_REQUEST")
    ]


def test_port_without_files_listens_again(authority: trustme.CA, caplog: pytest.LogCaptureFixture) -> None:
    """B12: at the limit of open files nothing is accepted and the log says why; later the port resumes."""

    async def story(port: Port) -> None:
        FewFiles.refusals = 2
        assert await (await port.client()).ask() == b"HTTP/1.1 200 OK"

    with caplog.at_level(logging.WARNING, "dstl_service"):
        listening(authority, story, FewFiles)
    assert [(record.message, vars(record)["reason"]) for record in caplog.records] == [
        ("cannot accept connections", "Too many open files")
    ]


def test_close_breaks_handshakes_off(authority: trustme.CA) -> None:
    """A stop does not wait for clients that have requested nothing."""

    async def story(port: Port) -> None:
        readers = [await port.silent() for _ in range(3)]
        await until(lambda: len(port.guard) == len(readers))
        port.listener.close()
        await port.listener.wait_closed()
        for reader in readers:
            await ended(reader)
        assert len(port.guard) == 0

    listening(authority, story)
