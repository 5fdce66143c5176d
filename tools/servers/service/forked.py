"""
Processes that run a command of ``dstl``, forked from one that has imported its modules.

A new Python takes 0.6 s of a processor to import them before a service can answer; a fork has them. The command runs as
in a process that was started for it: with its own environment, its output in a log, and its exit code.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MODULES = ("dstl_service.commands.serve", "storage.s3_store", "uvloop", "boto3")
"""The modules that every service imports, some only when it starts."""

context = multiprocessing.get_context("forkserver")
"""Forks processes; `MODULES` are imported once, before the first one."""
ROOM = "room_for_the_command_line_of_a_fork" * 60
"""Not the name of a module: it only makes the command line of the forking process longer."""

context.set_forkserver_preload([*MODULES, ROOM])

_AT_START = re.compile(r"PYTHON(?!PATH)|MALLOC_|GLIBC_|LD_|TZ$").match
"""Variables that a process reads when it starts."""
_COMMAND = [sys.executable, "-m", "dstl_service"]


def can_be_forked(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command is one of ``dstl`` in this Python, without another program or module around it."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    is_changed = any(path and path not in sys.path and Path(path, "sitecustomize.py").exists() for path in paths)
    own, given = ({name: value for name, value in of.items() if _AT_START(name)} for of in (os.environ, environment))
    return [*command[:3]] == _COMMAND and not is_changed and given.items() <= own.items()


class ForkedCommand:
    """
    A running command, with the methods of `subprocess.Popen` that its users need.

    Args:
        command: Its command line, see `can_be_forked`.
        environment: Its whole environment.
        log_path: Receives what it writes to standard output and error.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        arguments = [*command[len(_COMMAND) :]]
        # A daemon: if it is forgotten, it ends with this process instead of delaying its end.
        self._process = context.Process(target=_run, args=(arguments, dict(environment), log_path), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code; `subprocess.TimeoutExpired` if it still runs after seconds."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(_COMMAND, timeout or 0.0)
        return code

    def send_signal(self, sent: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sent)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: list[str], environment: dict[str, str], log_path: Path) -> None:
    from dstl_service.cli import main

    _show_command_line([*_COMMAND, *arguments])
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    raise SystemExit(main(arguments))


def _show_command_line(command: Sequence[str]) -> None:
    """Let the system show a command line as this process's own, by which sidecars are told from other processes."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    text = b"".join(os.fsencode(word) + b"\0" for word in command)
    if len(text) <= end - start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
