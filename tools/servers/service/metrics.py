"""Reads metrics of a running sidecar through its Unix socket."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def read_metric(path: Path, name: str, job: str) -> float:
    """
    Return the value of a metric with the label `job` alone, 0 if the sidecar has no such line.

    Args:
        path: The sidecar's socket.
        name: The metric's name.
        job: The job's name.

    Raises:
        OSError: The sidecar does not answer.
    """
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    start = f'{name}{{job="{job}"}} '
    return next((float(line.removeprefix(start)) for line in text.splitlines() if line.startswith(start)), 0.0)
