"""A service process on a Unix socket of its own, as the first task of a host starts it."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from loadtest.stack.programs import ServerError

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02
_LOG_TAIL_CHARS = 2_000


class ServiceProcess:
    """
    ``dstl serve`` in a process of its own, ready when entered, gone when left.

    Args:
        storage: URL of its storage.
        environment: What its environment has beside this process's, such as settings and credentials.
        arguments: What its command line has beside storage and socket.
    """

    def __init__(
        self, storage: str, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> None:
        self._storage = storage
        self._arguments = arguments
        self._environment = environment or {}
        # Paths of Unix sockets have at most 108 characters, which folders of test runs may pass.
        self._folder = tempfile.TemporaryDirectory(prefix="ds")
        self.socket_path = Path(self._folder.name) / "s"
        self.log_path = Path(self._folder.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it listens, as clients take it."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        """Its process id; `ServerError` if it does not run."""
        if self._process is None:
            raise ServerError("the service does not run")
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the processor time that it has used, in user and in kernel mode."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

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
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", self._storage]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--socket", str(self.socket_path), *self._arguments],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                log_tail = self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
                self.stop(signal.SIGKILL)
                raise ServerError(f"the service did not start; the end of its log:\n{log_tail}")
            time.sleep(_POLL_S)

    def stop(self, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop it, by its process id; with SIGKILL as a crash does."""
        if self._process is None:
            return
        self._process.send_signal(stop_signal)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def wait_for_end(self, timeout_s: float) -> int:
        """Wait until it has ended, by itself or after a signal; return its exit code."""
        if self._process is None:
            raise ServerError("the service was not started")
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the service did not end within {timeout_s} s") from None
        self._process = None
        return code

    def _answers(self) -> bool:
        with suppress(OSError, http.client.HTTPException), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(self.socket_path))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200 ")
        return False
