"""A sidecar behind a gate: while it is closed, tables of some key groups that have to be restored as a whole wait."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tools.servers.service.process import ServiceProcess

_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


class GatedService:
    """
    A service process and a socket in front of it. Starts with an open gate.

    Args:
        storage: URL of the service's storage.
        folder: Where the socket is.
        first_key_group: The first key group of the tables that the gate holds.
        environment: Settings of the service.
    """

    def __init__(self, storage: str, folder: Path, first_key_group: int, environment: dict[str, str]) -> None:
        self.service = ServiceProcess(storage, environment)
        self.path = folder / "gate.sock"
        self.held = 0
        """Number of restores that were held."""
        self._wanted = f"first_key_group={first_key_group}&".encode()
        self._open = threading.Event()
        self._open.set()

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"unix://{self.path}"

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Run it in this context."""
        with self.service, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen(100)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            try:
                yield self
            finally:
                self._open.set()

    def close(self) -> None:
        """Close the gate."""
        self._open.clear()

    def open(self) -> None:
        """Open it: what is held goes on."""
        self._open.set()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self.service.socket_path))
            threading.Thread(target=_pump, args=(server, client), daemon=True).start()
            while request := _request(client):
                if request.startswith(b"GET") and self._wanted in request and b"restore?" in request:
                    self._hold(request)
                server.sendall(request)

    def _hold(self, request: bytes) -> None:
        head = request.partition(b"\r\n")[0]
        if b"have=" in head or b"output=" in head:
            return
        self.held += not self._open.is_set()
        self._open.wait()


def _request(client: socket.socket) -> bytes:
    """Read one request; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(1 << 16)
        if not more:
            return b""
        data += more
    head, _, _ = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    size = len(head) + 4 + (int(length[1]) if length else 0)
    while len(data) < size:
        data += client.recv(1 << 20)
    return data


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 20):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
