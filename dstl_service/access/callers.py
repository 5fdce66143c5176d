"""
Identity of a caller by its connection: the peer's user on a Unix socket, the client certificate with TLS.

The socket's mode keeps others out too, but modes change and folders are shared; so each connection is checked.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dstl_service.access.tokens import CALLER, Caller
from dstl_service.process.logs import LogLimiter
from storage.clock import SystemClock
from storage.errors import UnauthorizedError
from storage.private_folder import Trust, user_name
from storage.unix_peer import peer_uid

_REFUSED_S = 5.0
"""Longest time for a refused caller to send a request and get the reason."""

logger = logging.getLogger("dstl_service")


def identified(protocol: type[HttpToolsProtocol], trust: Trust) -> type[HttpToolsProtocol]:
    """
    Return a protocol that serves only trusted callers, and puts a `Caller` into each request's scope.

    Args:
        protocol: The HTTP protocol to extend.
        trust: Users whose processes may call over a Unix socket; over TCP, tokens and certificates decide.
    """
    refused = LogLimiter(SystemClock())

    class Identified(protocol):  # type: ignore[valid-type, misc]  # a base class may be a value
        _refused_uid: int | None = None
        _caller: Caller | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            uid = _user_of(transport)
            if uid is not None and not trust.includes(uid):
                self._refused_uid = uid  # before all else: a connection whose set-up fails serves nobody
                if connections := refused.count():
                    logger.warning("caller of another user refused", extra={"uid": uid, "connections": connections})
                self.loop.call_later(_REFUSED_S, transport.close)
            super().connection_made(transport)
            self._caller = Caller(_certificate_names(transport), "" if uid is None else user_name(uid))

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[CALLER] = self._caller

        def data_received(self, data: bytes) -> None:
            if self._refused_uid is None:
                super().data_received(data)
                return
            # Only after a read: closing a socket with unread data resets the connection, and the answer is lost.
            self.transport.write(_refusal(self._refused_uid))
            self.transport.close()

    return Identified


def _user_of(transport: asyncio.Transport) -> int | None:
    connection: Any = transport.get_extra_info("socket")
    try:
        return None if connection is None else peer_uid(connection.fileno())
    except OSError:
        return -1  # disconnected already; no user has this id


def _certificate_names(transport: asyncio.Transport) -> tuple[str, ...]:
    """Return the names in the caller's certificate; empty unless it showed one that TLS verified."""
    connection: Any = transport.get_extra_info("ssl_object")
    certificate = {} if connection is None else connection.getpeercert() or {}
    common = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return (*common, *(value for _, value in certificate.get("subjectAltName", ())))


def _refusal(uid: int) -> bytes:
    error = UnauthorizedError(
        f"this service serves processes of its own user and of trusted users only, not of {user_name(uid)}: run both "
        "as one user, or add that user to the service's setting trusted_uids"
    )
    body = json.dumps(error.to_dict()).encode()
    head = f"HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
