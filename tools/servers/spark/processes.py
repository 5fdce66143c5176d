"""The processes of a cluster here: each writes a log, and is stopped by its pid, with all that it started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tools.servers.programs import ServerError

_READY_TIMEOUT_S = 120.0
_LOG_TAIL_CHARS = 2_000


class ClusterProcesses:
    """
    Ready on enter, stopped on exit. A subclass starts the processes.

    Args:
        folder: Folder of logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that were started here."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start all processes, and wait until they are ready."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all processes of the cluster."""
        descendants = self.descendants()
        for process in self._processes:
            process.kill()
            process.wait()
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()

    def descendants(self) -> list[psutil.Process]:
        """Return the processes that those of the cluster have started, such as executors."""
        found: list[psutil.Process] = []
        for pid in self.pids:
            with suppress(psutil.NoSuchProcess):
                found += psutil.Process(pid).children(recursive=True)
        return found

    def launch(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start a process in a folder; `name` is that of its log."""
        with open(self._log(name), "wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
            )
        self._processes.append(process)

    def wait_for(self, name: str, text: str) -> None:
        """Wait until a process has logged a text; `ServerError` with the end of its log if it does not."""
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while text not in (log := self._log(name).read_text(encoding="utf-8", errors="replace")):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                raise ServerError(f"{name} is not ready; its log ends: {log[-_LOG_TAIL_CHARS:]}")
            time.sleep(0.05)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
