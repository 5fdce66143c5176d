"""
Toxiproxy in front of a server: a network that is slow, limited, silent or broken.

A toxic affects existing and new connections until it is removed. Latency and rate apply to each connection separately.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tools.servers.programs import ServerError, ServerProcess, free_port, go_program
from tools.servers.versions import TOXIPROXY_MODULE, TOXIPROXY_VERSION

Direction: TypeAlias = Literal["upstream", "downstream"]
"""Upstream is from client to server, downstream from server to client."""

_TIMEOUT_S = 60.0
_PROXY = "target"


def toxiproxy_program() -> Path:
    """Return the proxy's program, built if missing."""
    return go_program("server", TOXIPROXY_MODULE, TOXIPROXY_VERSION)


class Toxiproxy(ServerProcess):
    """
    A Toxiproxy with one proxy, from a port of its own to `target`.

    Args:
        target: Host and port of the proxied server.
        folder: Folder of its log.
    """

    def __init__(self, target: str, folder: Path) -> None:
        super().__init__("Toxiproxy", folder / "toxiproxy.log")
        self._target = target
        self._proxy_port = 0

    @property
    def proxy_url(self) -> str:
        """URL of the proxied server for clients."""
        return f"http://{self.address}:{self._proxy_port}"

    def command(self, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """Serve its API; the proxy is created afterwards."""
        return [str(toxiproxy_program()), "-host", self.address, "-port", str(port)], {"LOG_LEVEL": "warn"}

    def start(self) -> None:
        """Start it with its one proxy."""
        super().start()
        self._proxy_port = self._proxy_port or free_port()
        listen = f"{self.address}:{self._proxy_port}"
        self._ask("POST", "/proxies", {"name": _PROXY, "listen": listen, "upstream": self._target})

    @contextmanager
    def toxic(self, kind: str, direction: Direction = "downstream", **attributes: int) -> Iterator[None]:
        """
        Inject a fault while the context is open.

        Args:
            kind: latency (latency, jitter in ms), bandwidth (rate in KB/s), timeout (timeout in ms, then the connection
                ends; 0 for never), reset_peer (timeout in ms), limit_data (bytes), slow_close (delay in ms).
            direction: The affected direction.
            attributes: Attributes of the kind.
        """
        toxic = {"name": kind, "type": kind, "stream": direction, "attributes": attributes}
        self._ask("POST", f"/proxies/{_PROXY}/toxics", toxic)
        try:
            yield
        finally:
            self._ask("DELETE", f"/proxies/{_PROXY}/toxics/{kind}", None)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Refuse new connections and end existing ones while the context is open."""
        self._ask("POST", f"/proxies/{_PROXY}", {"enabled": False})
        try:
            yield
        finally:
            self._ask("POST", f"/proxies/{_PROXY}", {"enabled": True})

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ServerError(f"Toxiproxy refused {method} {path}: {text!r}")
