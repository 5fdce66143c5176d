"""Requests as raw bytes, since client libraries would not send them, and their answers."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_QUIET_S = 0.12
"""An answered connection that is silent for this long will send nothing more."""

Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The data received on a connection."""

    data: bytes
    is_closed: bool
    """Whether the service closed it."""
    seconds: float
    sent_bytes: int = 0

    @property
    def statuses(self) -> list[int]:
        """The statuses of all responses, in order."""
        return [int(text) for text in _STATUS.findall(self.data)]

    @property
    def status(self) -> int:
        """The status of the first response, 0 without one."""
        return self.statuses[0] if self.statuses else 0

    @property
    def is_refused(self) -> bool:
        """Whether the request was refused: a caller's error, a redirect, back-pressure, or a closed connection."""
        return 300 <= self.status < 500 or self.status == 503 or (not self.statuses and self.is_closed)


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, host: str = "127.0.0.1"
) -> bytes:
    """Return a well-formed request; `headers` replace or extend the default ones."""
    fields = {"host": host, "connection": "close"}
    if body or method in ("POST", "PUT"):
        fields |= {"content-length": str(len(body)), "content-type": "application/json"}
    fields |= headers or {}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def ask(address: Address, *pieces: bytes, wait_s: float = 5.0, tls: ssl.SSLContext | None = None) -> Answer:
    """Send pieces on a new connection and return the answer received within `wait_s`."""
    with connected(address) as plain, _secured(plain, tls) as connection:
        return talk(connection, pieces, wait_s)


def talk(connection: socket.socket, pieces: Iterable[bytes], wait_s: float = 5.0) -> Answer:
    """Send pieces, as far as they are accepted, and return the answer received within `wait_s`."""
    started, sent = time.monotonic(), 0
    with suppress(OSError):  # a service may answer and close before everything is sent
        connection.settimeout(wait_s)
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    data, is_closed = _receive(connection, started + wait_s)
    return Answer(data, is_closed, time.monotonic() - started, sent)


@contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    """Yield a connection."""
    if not isinstance(address, str):
        with socket.create_connection(address, timeout=5.0) as connection:
            yield connection
        return
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        connection.connect(address)
        yield connection


def _secured(plain: socket.socket, tls: ssl.SSLContext | None) -> socket.socket:
    return plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")


def closed_within(connections: Sequence[socket.socket], seconds: float) -> int:
    """Wait until the service has closed these connections; return how many it has."""
    deadline, still_open = time.monotonic() + seconds, set(connections)
    while still_open and time.monotonic() < deadline:
        still_open -= {connection for connection in still_open if _is_closed(connection)}
        time.sleep(0.05)
    return len(connections) - len(still_open)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while data := connection.recv(65536):
            del data  # an answer before the close
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _receive(connection: socket.socket, deadline: float) -> tuple[bytes, bool]:
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(min(left, _QUIET_S) if _STATUS.search(data) else left)
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            break
        except OSError:
            return data, True
        if not piece:
            return data, True
        data += piece
    return data, False
