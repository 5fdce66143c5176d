"""
Rewinds a job with ``dstl rewind`` in a process of its own, which may be killed or suspended half way.

An interrupted rewind has happened completely or not at all; the next open of the job shows which.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Mapping

from tools.servers.service.forked import context

_TIMEOUT_S = 60.0


class Fate(enum.StrEnum):
    """Fate of the process that rewinds a job."""

    ENDS = "ends"
    KILLED = "killed"
    SUSPENDED = "suspended"


class Rewinding:
    """
    One ``dstl rewind``, started on construction.

    Args:
        storage: URL of the storage.
        environment: Additional environment variables.
        job: The job.
        checkpoint_id: The checkpoint to which the job is rewound.
    """

    def __init__(self, storage: str, environment: Mapping[str, str], job: str, checkpoint_id: int) -> None:
        arguments = ["rewind", "--storage", storage, "--checkpoint", str(checkpoint_id), "--write", job]
        self._process = context.Process(target=_rewind, args=(arguments, dict(environment)), daemon=True)
        self._process.start()

    def meet(self, fate: Fate, after_s: float) -> bool:
        """Let it run for a while, or to its end; return whether it succeeded."""
        if fate is not Fate.ENDS:
            time.sleep(after_s)  # the delay is the test's input
            if self._process.is_alive() and self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGKILL if fate is Fate.KILLED else signal.SIGSTOP)
            if fate is Fate.SUSPENDED:
                return False
        return self.end()

    def wake(self) -> None:
        """Resume a suspended one."""
        if self.is_running() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def is_running(self) -> bool:
        """Whether it has not ended yet; true for a suspended one."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()

    def end(self) -> bool:
        """Wait until it has ended; return whether it succeeded."""
        self._process.join(_TIMEOUT_S)
        if self._process.is_alive():
            self.kill()
        return self._process.exitcode == 0


def _rewind(arguments: list[str], environment: dict[str, str]) -> None:
    from dstl_service.cli import main

    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.environ.update(environment)
    raise SystemExit(main(arguments))
