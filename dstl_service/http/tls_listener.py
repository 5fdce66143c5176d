"""
Accepts TLS connections; each counts before its handshake begins.

The event loop's own server reports a connection only after its handshake: clients that connect and send nothing would
take all file descriptors of the process, uncounted by any bound. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from dstl_service.http.connections import Connections, Endable

_AT_ONCE = 16
"""Most connections accepted in one event-loop turn."""
_AGAIN_S = 0.2
"""Pause after `accept` failed, as it does when file descriptors run out."""
_CLOSE_S = 5.0
"""Longest wait for the client's TLS close message. Some clients never send it."""


class TlsListener:
    """
    Serves a listening socket until it is closed.

    Args:
        listener: The socket; its owner closes it after this.
        context: Called for each connection; returns the certificate to show, and whether the client's is asked for.
        make_protocol: Makes the protocol of a connection; it passes the handshake to `Connections.admit`.
        guard: Bounds the connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: Callable[[], ssl.SSLContext],
        make_protocol: Callable[[Endable], asyncio.Protocol],
        guard: Connections,
    ) -> None:
        self._listener = listener
        self._context = context
        self._make_protocol = make_protocol
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}
        self._again: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting, and abort running handshakes: none of them carries a request yet."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._listener)
        for handshake in self._handshakes.values():
            handshake.end()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, client = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client disconnected already
            except OSError as error:
                self._guard.log("cannot accept connections", None, error.strerror or str(error))
                self._loop.remove_reader(self._listener)  # it stays readable, so the loop would spin
                self._again = self._loop.call_later(_AGAIN_S, self._listen)
                return
            self._begin(_Handshake(connection, client))

    def _begin(self, handshake: _Handshake) -> None:
        if not self._guard.begin_handshake(handshake):
            handshake.end()
            return
        task = self._loop.create_task(self._shake_hands(handshake))
        handshake.task = task
        self._handshakes[task] = handshake
        task.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, handshake: _Handshake) -> None:
        connection = handshake.begin()
        if connection is None:
            return
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(handshake),
                connection,
                ssl=self._context(),
                ssl_handshake_timeout=2 * self._guard.handshake_timeout_s,  # by then the guard has ended it
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except ssl.SSLError as error:
            self._guard.log("handshake failed", handshake, error.reason or type(error).__name__)
        except OSError:
            pass  # the client disconnected, as every probe that only connects does
        finally:
            self._guard.forget(handshake)


class _Handshake:
    """A connection whose TLS handshake has not ended."""

    def __init__(self, connection: socket.socket, client: object) -> None:
        self.client = client
        """The client's address."""
        self.task: asyncio.Task[None] | None = None
        self._connection: socket.socket | None = connection

    def begin(self) -> socket.socket | None:
        """Hand the socket over to the event loop; None if it was closed already."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def end(self) -> None:
        """Abort the handshake; no effect on a connection whose handshake has ended."""
        connection = self._connection
        if connection is not None:  # not yet handed to the event loop
            self._connection = None
            connection.close()
        elif self.task is not None:
            self.task.cancel()
