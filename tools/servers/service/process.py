"""A service process on a Unix socket of its own, as the first task of a host starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

import psutil

from tools.servers.programs import ServerError, end_process
from tools.servers.service.forked import ForkedCommand, can_be_forked
from tools.servers.service.on_socket import SocketService

_STOP_TIMEOUT_S = 30.0


class ServiceProcess(SocketService):
    """
    ``dstl serve`` in a process of its own, ready on enter, stopped on exit.

    Args:
        storage: URL of its storage.
        environment: Additional environment variables, such as settings and credentials.
        arguments: Additional arguments besides storage and socket.
    """

    is_forked: ClassVar[bool] = False
    """Whether it starts as a fork, if it can: tests start hundreds. Measurements start a Python of its own."""

    def __init__(
        self, storage: str, environment: Mapping[str, str] | None = None, arguments: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._storage = storage
        self._arguments = arguments
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None

    @property
    def pid(self) -> int:
        """Its process id; `ServerError` if it is not running."""
        if self._process is None:
            raise ServerError("the service is not running")
        return self._process.pid

    def cpu_s(self) -> float:
        """Return its CPU time in seconds, user and kernel mode."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        self._start({})

    def restart(self, **environment: str) -> None:
        """Kill it and start it again at the same address; `environment` is added for the new process only."""
        self.stop(signal.SIGKILL)
        self._start(environment)

    def stop(self, stop_signal: signal.Signals = signal.SIGTERM) -> None:
        """Stop it by its process id; SIGKILL simulates a crash."""
        if self._process is None:
            return
        end_process(self._process, stop_signal, _STOP_TIMEOUT_S)
        self._process = None

    def wait_for_end(self, timeout_s: float) -> int:
        """Wait until it has ended, on its own or after a signal; return its exit code."""
        if self._process is None:
            raise ServerError("the service was not started")
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the service did not end within {timeout_s} s") from None
        self._process = None
        return code

    def command(self, command: list[str]) -> list[str]:
        """Return the command that starts it, by default the given one; a subclass may run it elsewhere."""
        return command

    def _start(self, more: Mapping[str, str]) -> None:
        serve = [sys.executable, "-m", "dstl_service", "serve", "--storage", self._storage]
        command = self.command([*serve, "--socket", str(self.socket_path), *self._arguments])
        process = self._process = self._started(command, {**os.environ, **self._environment, **more})
        self._wait_until_ready(lambda: process.poll() is None)

    def _started(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes] | ForkedCommand:
        if self.is_forked and can_be_forked(command, environment):
            return ForkedCommand(command, environment, self.log_path)
        with self.log_path.open("ab") as log:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
