"""
A service process that is there in a fraction of a second: it is forked from one that has imported everything.

Else a run of some hundred kills would mostly wait for imports. What is forked runs ``dstl serve`` as any other process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing.process import BaseProcess

from loadtest.stack.socket_service import SocketService

_STOP_TIMEOUT_S = 30.0

_context = multiprocessing.get_context("forkserver")
# What ``dstl serve`` imports, and what the main program imports: every child imports that one anew.
_context.set_forkserver_preload(["dstl_service.cli", "storage.s3_store", "uvloop", "loadtest.chaos.verify", "boto3"])


class ForkedService(SocketService):
    """
    ``dstl serve`` on a Unix socket, ready when entered, gone when left.

    Args:
        storage: URL of its storage.
        environment: What its environment has beside this process's.
    """

    def __init__(self, storage: str, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._storage = storage
        self._environment = dict(environment)
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start it and wait until it answers; `ServerError` with the end of its log if it does not."""
        arguments = ["serve", "--storage", self._storage, "--socket", str(self.socket_path)]
        process = self._process = _context.Process(
            target=_serve, args=(arguments, self._environment, str(self.log_path))
        )
        process.start()
        self._wait_until_ready(process.is_alive)

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


def _serve(arguments: list[str], environment: dict[str, str], log_path: str) -> None:
    from dstl_service.cli import main

    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.environ.update(environment)
    raise SystemExit(main(arguments))
