"""
Calls between services: a coordinator has the sidecars of other hosts persist their change sets.

Blocking; `calls` runs it in threads. The standard library's client suffices: one call per host and checkpoint.
Only handles and the kind of an error are passed on from a peer's answer: a client that names an address must not be
able to read answers from there.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from urllib.parse import urlsplit

from dstl_service.process.tcp_keepalive import keep_alive
from dstl_service.wire import ChangeSetRef, PersistRequest
from storage.errors import DstlError, ErrorKind, LostChangesError, UnavailableError, error_from_dict
from storage.model import SegmentHandle

CONNECT_TIMEOUT_S = 3.0
"""A host that does not accept a connection within this time counts as gone, and the sets that only it held as lost."""

_ASK_TIMEOUT_S = 10.0
"""Longest time of a request that does not wait for uploads."""

# An answer may take minutes; keep-alive detects a dead host in ten seconds.
_ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES, _UNREAD_S = 4, 2, 3, 10

_ANSWER_BYTES_MAX = 64 << 20
_LOGGED_CHARS_MAX = 200

logger = logging.getLogger("dstl_service")


class PeerClient:
    """
    Calls other services with this service's own token.

    Args:
        own_token: Called before each request; returns the token to send, or None.
        timeout_s: Longest time of a call, even if bytes keep arriving.
        tls: Called before each request over TLS; returns its context.
    """

    def __init__(
        self,
        own_token: Callable[[], str | None],
        timeout_s: float,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._own_token = own_token
        self._timeout_s = timeout_s
        self._tls = tls

    def persist(
        self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
    ) -> list[SegmentHandle]:
        """
        Have the service at `url` persist `refs` and a note; return the handles in order, or none without `wait`.

        Raises:
            LostChangesError: The service lacks a set, cannot be reached, or does not answer in time: its sets count as
                lost.
            UnavailableError: The answer cannot be read.
            DstlError: The service refused, with an error of this kind.
        """
        body = json.dumps(asdict(PersistRequest(max(ref.epoch for ref in refs), list(refs), wait, note))).encode()
        headers = {"content-type": "application/json"}
        if token := self._own_token():
            headers["authorization"] = f"Bearer {token}"
        timeout_s = self._timeout_s if wait else _ASK_TIMEOUT_S
        try:
            status, data = self._ask(url, f"/v1/jobs/{job}/persist", body, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            raise LostChangesError(
                f"service {url} cannot be reached: {error}; its change sets count as lost"
            ) from error
        try:
            answer = json.loads(data)
            if status < 300:
                return [SegmentHandle.from_dict(handle) for handle in answer["handles"]]
            reported = error_from_dict(answer)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UnavailableError(f"service {url} answered with status {status} and an unreadable body") from None
        raise without_its_words(url, reported)

    def _ask(self, url: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        """
        Return status and body of the answer.

        Services call each other directly: proxies of the environment are ignored, and redirects are not followed, as
        they could send the token elsewhere.
        """
        parts = urlsplit(url)
        if parts.scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S, context=self._tls()
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            keep_alive(connection.sock, _ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES, unread_s=_UNREAD_S)
            with _ended_after(timeout_s, connection.sock):
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                return response.status, _read(response)
        finally:
            connection.close()


@contextmanager
def _ended_after(timeout_s: float, connection: socket.socket) -> Iterator[None]:
    """Shut a connection down after a total time; a socket's own time-out restarts with every byte."""

    def end() -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # bypasses TLS, whose shutdown may block

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(response: http.client.HTTPResponse) -> bytes:
    data = response.read(_ANSWER_BYTES_MAX + 1)
    if len(data) > _ANSWER_BYTES_MAX:
        raise http.client.HTTPException(f"the answer has more than {_ANSWER_BYTES_MAX} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return data


def without_its_words(url: str, reported: DstlError) -> DstlError:
    """Return an error of the same kind without the peer's message, which only the log gets."""
    if reported.kind is not ErrorKind.LOST_CHANGES:
        words = reported.message[:_LOGGED_CHARS_MAX]
        logger.warning("peer refused", extra={"peer": url, "kind": reported.kind.value, "error": words})
    text = {
        ErrorKind.LOST_CHANGES: "lacks a change set: it was received by a process that is gone, or its checkpoint was "
        "aborted; the batch must be executed again",
        ErrorKind.UNAVAILABLE: "could not store its change sets now; nothing is lost, ask again",
        ErrorKind.UNAUTHORIZED: "does not accept this service's token; give all services of the cluster the same token",
    }.get(reported.kind, f"refused with {reported.kind.value}; see this service's log")
    return type(reported)(f"service {url} {text}")
