"""
Runs the processes of one engine, and watches what they use. A mark in their environment identifies them.

A process that outlives its parent, such as a sidecar, so counts as well, and nothing else is ever ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

MARK = "PEER_RUN"
_LOOK_S = 0.5
_GONE_S = 30.0
_LOG_CHARS = 3_000


class PeerError(Exception):
    """An engine did not run the job to its end; says why."""


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: its arguments, environment and folder."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: Path


@dataclass(slots=True)
class Usage:
    """The resources that processes have used: CPU in seconds, and the most memory at one time in bytes."""

    memory_bytes: int = 0
    _cpu_s: dict[tuple[int, float], float] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        """CPU time of all processes, those that have ended included."""
        return sum(self._cpu_s.values())

    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Take the present figures of running processes."""
        memory_bytes = 0
        for process in processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu_s[process.pid, process.create_time()] = times.user + times.system
                memory_bytes += process.memory_info().rss
        self.memory_bytes = max(self.memory_bytes, memory_bytes)


class Run:
    """
    One run of an engine.

    Args:
        commands: Its processes.
        folder: Of the run; the jobs write their progress into it, and their output goes to a log there.
    """

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self.usage = Usage()
        self.took_s = 0.0
        self._commands = commands
        self._folder = folder
        self._log = folder / "log"
        self._mark = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []

    def variable(self, name: str) -> str | None:
        """Return a variable of the first process that has it."""
        return next((one.environment[name] for one in self._commands if name in one.environment), None)

    def execute(self, timeout_s: float, is_enough: Callable[[], bool], stop: signal.Signals = signal.SIGTERM) -> None:
        """
        Start the processes, and wait until they have ended or it is enough; then end them.

        Raises:
            PeerError: One failed, or it takes too long; the message has the end of the log.
        """
        begun_s = time.monotonic()
        try:
            self._start()
            while any(process.poll() is None for process in self._processes) and not is_enough():
                self.usage.look(self.processes())
                if any(process.poll() for process in self._processes):
                    raise self._failed("a process failed")
                if time.monotonic() - begun_s > timeout_s:
                    raise self._failed(f"it has not ended after {timeout_s:.0f} s")
                time.sleep(_LOOK_S)
            self.took_s = time.monotonic() - begun_s
            if any(process.poll() for process in self._processes):
                raise self._failed("a process failed")
        finally:
            self._end(stop)

    def _start(self) -> None:
        with self._log.open("ab") as log:
            for command in self._commands:
                self._processes.append(
                    subprocess.Popen(
                        command.arguments,
                        cwd=command.folder,
                        env={**os.environ, **command.environment, MARK: self._mark},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def _end(self, stop: signal.Signals) -> None:
        """End what still runs, all processes of the run at once; wait until none is left."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(stop)
        until_s = time.monotonic() + _GONE_S
        while left := self.processes():
            if time.monotonic() > until_s:
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.1)
        for started in self._processes:
            started.wait()

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this run that live, whichever process started them."""
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def _failed(self, why: str) -> PeerError:
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
        return PeerError(f"{why}; the end of its log:\n{tail}")


def rows_made(folder: Path) -> int:
    """Return how many rows the jobs of a folder have told of so far."""
    return sum(points[-1][1] for points in _told(folder) if points)


def steady_rate(folder: Path) -> float | None:
    """
    Return rows per second over the second half of the rows; None if the jobs have told too little.

    Start and warm-up are in the first half.
    """
    steps = sorted((at_s, rows - before) for points in _told(folder) for (_, before), (at_s, rows) in _steps(points))
    total, made, half_s = sum(rows for _, rows in steps), 0, None
    rest = 0
    for at_s, rows in steps:
        made += rows
        if half_s is not None:
            rest += rows
        elif made >= total / 2:
            half_s = at_s
    took_s = steps[-1][0] - half_s if half_s is not None else 0.0
    return rest / took_s if took_s > 0 else None


def _steps(points: list[tuple[float, int]]) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    return list(pairwise([(0.0, 0), *points]))


def _told(folder: Path) -> list[list[tuple[float, int]]]:
    found = []
    for path in (folder / "progress").glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        found.append([(float(one["at_s"]), int(one["rows"])) for one in whole])
    return found
