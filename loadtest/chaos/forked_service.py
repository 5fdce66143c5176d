"""
A service process that starts in a fraction of a second: it is forked from one that has imported everything.

Otherwise a run of some hundred kills would mostly wait for imports. The forked process runs ``dstl serve`` like any
other, with a wall clock that the test sets.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from loadtest.chaos.jumping_clock import ClockOffset, install
from tools.servers.service.forked import MODULES, context
from tools.servers.service.on_socket import SocketService

_STOP_TIMEOUT_S = 30.0

context.set_forkserver_preload([*MODULES, "loadtest.chaos.verify"])


class ForkedService(SocketService):
    """
    ``dstl serve`` on a Unix socket, ready on enter, stopped on exit.

    `socket_path` is a link to the socket of the newest process, so that a hung process can be replaced while it still
    holds its own socket.

    Args:
        storage: URL of its storage.
        environment: Additional environment variables.
    """

    def __init__(self, storage: str, environment: Mapping[str, str]) -> None:
        super().__init__()
        self.clock = ClockOffset(self.log_path.with_name("clock"))
        self._storage = storage
        self._environment = dict(environment)
        self._process: BaseProcess | None = None
        self._hung: list[BaseProcess] = []
        self._started = 0

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        self._started += 1
        own_path = self.socket_path.with_name(f"s{self._started}")
        arguments = ["serve", "--storage", self._storage, "--socket", str(own_path)]
        process = self._process = context.Process(
            target=_serve, args=(arguments, self._environment, str(self.log_path), str(self.clock.path))
        )
        process.start()
        link = self.socket_path.with_name("link")
        link.symlink_to(own_path.name)
        link.replace(self.socket_path)
        self._wait_until_ready(process.is_alive)

    def kill(self) -> None:
        """Kill it, like a crash."""
        if self._process is not None:
            _kill(self._process)

    def hang(self) -> None:
        """Suspend it: its connections stay open without answers. `start` replaces it by another process."""
        process, self._process = self._process, None
        if process is not None and process.pid is not None:
            os.kill(process.pid, signal.SIGSTOP)
            self._hung.append(process)

    def resume(self) -> None:
        """Resume the hung processes, beside the one that replaced them."""
        for process in self._hung:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)

    def kill_resumed(self) -> None:
        """Kill the processes that hung."""
        for process in self._hung:
            _kill(process)
        self._hung.clear()

    def stop(self) -> None:
        """Stop it, and wait for its end."""
        self.kill_resumed()
        if self._process is not None:
            self._process.terminate()
            self._process.join(_STOP_TIMEOUT_S)
            self.kill()
            self._process = None


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _serve(arguments: list[str], environment: dict[str, str], log_path: str, clock_path: str) -> None:
    from dstl_service.cli import main

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(environment)
    install(Path(clock_path))
    raise SystemExit(main(arguments))
