"""
A service process that is there in a fraction of a second: it is forked from one that has imported everything.

Else a run of some hundred kills would mostly wait for imports. What is forked runs ``dstl serve`` as any other process.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from loadtest.stack.programs import ServerError

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.01
_LOG_TAIL_CHARS = 2_000

_context = multiprocessing.get_context("forkserver")
# What ``dstl serve`` imports, and what the main program imports: every child imports that one anew.
_context.set_forkserver_preload(["dstl_service.cli", "storage.s3_store", "uvloop", "loadtest.chaos.verify", "boto3"])


class ForkedService:
    """
    ``dstl serve`` on a Unix socket, ready when entered, gone when left.

    Args:
        storage: URL of its storage.
        environment: What its environment has beside this process's.
    """

    def __init__(self, storage: str, environment: Mapping[str, str]) -> None:
        self._storage = storage
        self._environment = dict(environment)
        self._folder = tempfile.TemporaryDirectory(prefix="ds")
        self.socket_path = Path(self._folder.name) / "s"
        self.log_path = Path(self._folder.name) / "log"
        self._process: BaseProcess | None = None

    @property
    def address(self) -> str:
        """Where it listens, as clients take it."""
        return f"unix://{self.socket_path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        arguments = ["serve", "--storage", self._storage, "--socket", str(self.socket_path)]
        self._process = _context.Process(target=_serve, args=(arguments, self._environment, str(self.log_path)))
        self._process.start()
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or not self._process.is_alive():
                log_tail = self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
                raise ServerError(f"the service did not start; the end of its log:\n{log_tail}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def stop(self) -> None:
        """Tell it to stop, and wait until it has."""
        if self._process is not None:
            self._process.terminate()
            self._process.join(_STOP_TIMEOUT_S)
            self.kill()
            self._process = None

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(self.socket_path))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200 ")
        return False


def _serve(arguments: list[str], environment: dict[str, str], log_path: str) -> None:
    from dstl_service.cli import main

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(environment)
    raise SystemExit(main(arguments))
