"""
The server of a service process, and how it ends: within its time, with an answer to everybody who waits.

On SIGTERM (or Ctrl-C) the service takes nothing more in and uploads what it holds, while requests that were begun are
answered. Shares of the time are kept for what comes after, see `dstl_service.process.stop_time`. At the end the process
is gone, whatever hangs: a set that was only received is lost by that as by a kill, and reported as lost to the driver
that names it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from dstl_service.http.connections import Connections, Endable
from dstl_service.http.http_protocol import BoundedHttpProtocol
from dstl_service.http.tls_listener import TlsListener
from dstl_service.process.stop_time import ANSWERED_BY
from storage.errors import ClosedError

_TICK_S = 0.1  # The server looks for signals this often.

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]


class StoppingServer(uvicorn.Server):
    """
    A server that ends within `timeout_s` of the signal.

    Args:
        config: Its grace is set here.
        begin_stop: Called on the event loop as soon as the signal is seen.
        timeout_s: The whole time, from the signal to the end of the process.
        guard: Bounds the connections; with TLS from before their handshakes.
    """

    def __init__(
        self, config: uvicorn.Config, begin_stop: Callable[[], None], timeout_s: float, guard: Connections
    ) -> None:
        config.timeout_graceful_shutdown = timeout_s * ANSWERED_BY  # type: ignore[assignment]  # goes to wait_for
        super().__init__(config)
        self._begin_stop = begin_stop
        self._timeout_s = timeout_s
        self._guard = guard

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; called by the server's main loop."""
        context = self.config.ssl
        await super().startup(sockets if context is None else [])
        if context is not None:
            listeners = [TlsListener(item, context, self._protocol, self._guard) for item in sockets or ()]
            self.servers.extend(listeners)  # type: ignore[arg-type]  # are closed and waited for as others are

    def _protocol(self, handshake: Endable) -> asyncio.Protocol:
        protocol: BoundedHttpProtocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]  # ours
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.handshake = handshake
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; called by the server's main loop."""
        # A thread, for the event loop may wait for threads that hang in calls to the store.
        end = threading.Timer(max(0.0, self._timeout_s - _TICK_S), os._exit, (1,))
        end.daemon = True
        end.start()
        self._begin_stop()
        await super().shutdown(sockets)


class ShutdownMiddleware:
    """Answers requests that the server gives up at its end with 503: whoever waits asks the next process."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Pass the request on."""
        started = False

        async def watched(message: _Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http" or started:
                raise
            error = ClosedError("the service was stopped before it could answer; send the request again")
            body = json.dumps(error.to_dict()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"retry-after", b"1"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})
