"""
Accepts connections with TLS, each of which counts before its handshake begins.

The event loop's own server tells nobody of a connection whose handshake has not ended: clients that connect and say
nothing would take all files of the process, and no bound would see them. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from dstl_service.http.connections import Connections, Endable

_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop."""
_AGAIN_S = 0.2
"""When the system is asked again that had no file left."""
_CLOSE_S = 5.0
"""How long a client may take to say that it has read all. Some never do."""


class TlsListener:
    """
    Serves a listening socket until it is closed.

    Args:
        listener: The socket; its owner closes it after this.
        context: Says which certificate is shown, and asked for.
        make_protocol: Makes what serves a connection behind this handshake, which `Connections.admit` is to be told of.
        guard: Bounds the connections.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
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
        """Accept nobody more, and break off the handshakes: none of them has asked for anything."""
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
                continue  # it is gone already
            except OSError as error:
                self._guard.log("cannot accept connections", None, error.strerror or str(error))
                self._loop.remove_reader(self._listener)  # which is ready to be read all the time
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
                ssl=self._context,
                ssl_handshake_timeout=2 * self._guard.handshake_timeout_s,  # by then the guard has ended it
                ssl_shutdown_timeout=_CLOSE_S,
            )
        except ssl.SSLError as error:
            self._guard.log("handshake failed", handshake, error.reason or type(error).__name__)
        except OSError:
            pass  # the client is gone, as every probe that only connects is
        finally:
            self._guard.forget(handshake)


class _Handshake:
    """A connection of which it is not known yet whether a client is behind it."""

    def __init__(self, connection: socket.socket, client: object) -> None:
        self.client = client
        """Its address."""
        self.task: asyncio.Task[None] | None = None
        self._connection: socket.socket | None = connection

    def begin(self) -> socket.socket | None:
        """Hand the socket over to the event loop; None if there is none any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def end(self) -> None:
        """Break it off; without effect on what a handshake led to."""
        connection = self._connection
        if connection is not None:  # the event loop knows nothing of it yet
            self._connection = None
            connection.close()
        elif self.task is not None:
            self.task.cancel()
