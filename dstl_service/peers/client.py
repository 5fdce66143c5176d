"""
Calls between services: the coordinator asks the sidecars of other hosts to make their sets durable.

Blocking; `calls` calls it in threads. The standard library's client is enough: a call per host and checkpoint.
Nothing of what a peer answers but handles and the kind of its error is handed on: who asks for a call to an address
shall not read by it what is said there.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from dstl_service.process.tcp_keepalive import keep_alive
from dstl_service.wire import ChangeSetRef, PersistRequest
from storage.errors import DstlError, ErrorKind, LostChangesError, UnavailableError, error_from_dict
from storage.model import SegmentHandle

CONNECT_TIMEOUT_S = 3.0
"""A host that does not take a connection within this time is taken to be gone, with the sets that only it held."""

_ASK_TIMEOUT_S = 10.0
"""How long a request may take that only starts something."""

# An answer may take minutes; a host that is gone is noticed in ten seconds.
_ALIVE_AFTER_S, _ALIVE_EVERY_S, _ALIVE_PROBES, _UNREAD_S = 4, 2, 3, 10

_ANSWER_BYTES_MAX = 64 << 20
_LOGGED_CHARS_MAX = 200

logger = logging.getLogger("dstl_service")


class PeerClient:
    """
    Talks to other services with this service's own token.

    Args:
        own_token: Asked before each call: the token to show, or None.
        timeout_s: How long a call may take, whatever is said meanwhile.
        ca_file: Certificates by which services are known; None: those of the system.
        tls: Asked before each call over TLS for what it needs, in place of `ca_file`.
    """

    def __init__(
        self,
        own_token: Callable[[], str | None],
        timeout_s: float,
        ca_file: Path | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._own_token = own_token
        self._timeout_s = timeout_s
        context = ssl.create_default_context(cafile=ca_file) if tls is None else tls()
        self._tls = tls or (lambda: context)

    def persist(
        self, url: str, job: str, refs: Sequence[ChangeSetRef], *, wait: bool, note: str | None = None
    ) -> list[SegmentHandle]:
        """
        Have the service at `url` persist `refs` and a note; return the handles in order, or nothing without `wait`.

        Raises:
            LostChangesError: That service does not hold a set, cannot be reached, or does not answer in time: its sets
                count as lost.
            DstlError: It refused, with an error of this kind.
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
            raise UnavailableError(f"service {url} answered {status} and no more that can be read") from None
        raise _without_its_words(url, reported)

    def _ask(self, url: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
        """
        Return status and body of the answer.

        Services talk to each other directly, whatever proxy the environment names for the outside, and go nowhere else:
        an answer that sends the token to another address is not followed.
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
    """Break a connection off at a moment, for a time-out of the socket begins anew with every byte."""

    def end() -> None:
        try:
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS would say goodbye first
        except OSError:
            return

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
        raise http.client.HTTPException(f"an answer of more than {_ANSWER_BYTES_MAX} bytes")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return data


def _without_its_words(url: str, reported: DstlError) -> DstlError:
    """Return an error of the same kind that hands on nothing of what the peer said; the log has it."""
    if reported.kind is not ErrorKind.LOST_CHANGES:
        words = reported.message[:_LOGGED_CHARS_MAX]
        logger.warning("peer refused", extra={"peer": url, "kind": reported.kind.value, "error": words})
    text = {
        ErrorKind.LOST_CHANGES: "lacks a change set: it was received by a process that is gone, or its checkpoint was "
        "given up; the batch must be executed again",
        ErrorKind.UNAVAILABLE: "could not store its change sets now; nothing is lost, ask again",
        ErrorKind.UNAUTHORIZED: "does not accept this service's token; all services of a cluster share one",
    }.get(reported.kind, f"refused with {reported.kind.value}; see this service's log")
    return type(reported)(f"service {url} {text}")
