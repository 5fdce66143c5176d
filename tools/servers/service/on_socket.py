"""A service on a Unix socket of its own, for tests and benchmarks; base class of several ways to start it."""

from __future__ import annotations

import http.client
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from tools.servers.programs import ServerError

_READY_TIMEOUT_S = 90.0
_POLL_S = 0.01
_LOG_TAIL_CHARS = 2_000


class SocketService:
    """Ready on enter, stopped on exit. A subclass starts and ends the process, which serves on `socket_path`."""

    def __init__(self) -> None:
        # Paths of Unix sockets have at most 108 characters, which folders of test runs may exceed.
        self._folder = tempfile.TemporaryDirectory(prefix="ds")
        self.socket_path = Path(self._folder.name) / "s"
        self.log_path = Path(self._folder.name) / "log"

    @property
    def address(self) -> str:
        """Its address, in the form that clients accept."""
        return f"unix://{self.socket_path}"

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop it by its process id."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def _wait_until_ready(self, runs: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or not runs():
                log_tail = self.log()[-_LOG_TAIL_CHARS:]
                self.stop()
                raise ServerError(f"the service did not start; the end of its log:\n{log_tail}")
            time.sleep(_POLL_S)

    def ask(self, method: str, path: str, body: bytes | None = None, timeout_s: float = 60.0) -> bytes:
        """Send one request without a retry; return the answer's body. `ServerError` if it is an error."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(str(self.socket_path))
            connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ServerError(f"the service refused {method} {path}: {content!r}")
        return content

    def metrics(self) -> dict[str, float]:
        """Return its metrics: the sum over all labels, by sample name; 0 for a missing one."""
        sums: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(self.ask("GET", "/metrics").decode()):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return sums

    def log(self) -> str:
        """Return its log so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException, ServerError):
            self.ask("GET", "/health", timeout_s=1.0)
            return True
        return False
