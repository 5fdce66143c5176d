"""
Who calls, as far as the connection tells: on a Unix socket the kernel says whose process it is, with TLS a certificate.

A socket's mode keeps others out as well, but modes change and folders are shared; this is asked for each connection.
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
"""How long who is refused may take to ask, and be told why."""

logger = logging.getLogger("dstl_service")


def identified(protocol: type[HttpToolsProtocol], trust: Trust) -> type[HttpToolsProtocol]:
    """
    Return a protocol that answers only callers who are trusted.

    Args:
        protocol: What speaks HTTP.
        trust: Whose processes may call over a Unix socket; over TCP a token tells that.
    """
    refused = LogLimiter(SystemClock())

    class Identified(protocol):  # type: ignore[valid-type, misc]  # a class that is given is one
        _refused_uid: int | None = None
        _caller: Caller | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            uid = _user_of(transport)
            self._caller = Caller(_certificate_names(transport), "" if uid is None else user_name(uid))
            if uid is not None and not trust.includes(uid):
                self._refused_uid = uid
                if connections := refused.count():
                    logger.warning("caller of another user refused", extra={"uid": uid, "connections": connections})
                self.loop.call_later(_REFUSED_S, transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[CALLER] = self._caller

        def data_received(self, data: bytes) -> None:
            if self._refused_uid is None:
                super().data_received(data)
                return
            # Only now: the kernel throws an answer away when a connection is closed with something unread in it.
            self.transport.write(_refusal(self._refused_uid))
            self.transport.close()

    return Identified


def _user_of(transport: asyncio.Transport) -> int | None:
    connection: Any = transport.get_extra_info("socket")
    try:
        return None if connection is None else peer_uid(connection.fileno())
    except OSError:
        return -1  # gone already: nobody's


def _certificate_names(transport: asyncio.Transport) -> tuple[str, ...]:
    """Return the names in the caller's certificate, if it showed one and somebody vouches for it."""
    connection: Any = transport.get_extra_info("ssl_object")
    certificate = {} if connection is None else connection.getpeercert() or {}
    common = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    return (*common, *(value for _, value in certificate.get("subjectAltName", ())))


def _refusal(uid: int) -> bytes:
    error = UnauthorizedError(
        f"this service answers processes of its own user only, and {user_name(uid)} asks: run both as one user, or "
        "let the service's setting trusted_uids name that one"
    )
    body = json.dumps(error.to_dict()).encode()
    head = f"HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
