"""
The server of a service process and its bounded stop, with an answer to every waiting request.

On SIGTERM (or Ctrl-C) the service refuses new change sets and uploads what it holds, while running requests are
answered. Shares of the time are reserved for later steps, see `dstl_service.process.stop_time`. When the time is over,
the process exits, even if calls hang. Change sets that are not durable by then are lost as by a kill, and reported as
lost to the driver that names them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.http.connections import Connections, Endable
from dstl_service.http.errors import error_response
from dstl_service.http.http_protocol import BoundedHttpProtocol
from dstl_service.http.tls_listener import TlsListener
from dstl_service.process.stop_time import ANSWERED_BY
from storage.errors import ClosedError

_TICK_S = 0.1  # The server checks for signals at this interval.


class StoppingServer(uvicorn.Server):
    """
    A server whose process ends within `timeout_s` of the signal.

    Args:
        config: uvicorn's configuration; its graceful shutdown time-out is set here.
        begin_stop: Called on the event loop as soon as the signal is seen.
        timeout_s: Time from the signal to the end of the process.
        guard: Bounds the connections; with TLS, their handshakes too.
        tls: Returns the TLS context for a new connection; None without TLS.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        begin_stop: Callable[[], None],
        timeout_s: float,
        guard: Connections,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        config.timeout_graceful_shutdown = timeout_s * ANSWERED_BY  # type: ignore[assignment]  # goes to wait_for
        super().__init__(config)
        self._begin_stop = begin_stop
        self._timeout_s = timeout_s
        self._guard = guard
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen; called by the server's main loop."""
        tls = self._tls
        await super().startup(sockets if tls is None else [])
        if tls is not None:
            listeners = [TlsListener(item, tls, self._protocol, self._guard) for item in sockets or ()]
            self.servers.extend(listeners)  # type: ignore[arg-type]  # closed and awaited like asyncio's servers

    def _protocol(self, handshake: Endable) -> asyncio.Protocol:
        protocol: BoundedHttpProtocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]  # ours
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.handshake = handshake
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; called by the server's main loop."""
        # A thread: the event loop may wait for threads that hang in calls to the store.
        end = threading.Timer(max(0.0, self._timeout_s - _TICK_S), os._exit, (1,))
        end.daemon = True
        end.start()
        self._begin_stop()
        await super().shutdown(sockets)


class ShutdownMiddleware:
    """Answers requests that are cancelled at the stop with 503: the client asks the next process."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http" or started:
                raise
            error = ClosedError("the service was stopped before it could answer; send the request again")
            await error_response(error)(scope, receive, send)
