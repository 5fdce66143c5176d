"""
Sets a job back with ``dstl rewind`` in a process of its own, which is killed or suspended in the middle if asked to.

What was interrupted may have happened or not, but nothing in between: whoever opens the job next finds out.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Mapping

from loadtest.chaos.forked_service import context

_TIMEOUT_S = 60.0


class Fate(enum.StrEnum):
    """What happens to the process that sets a job back."""

    ENDS = "ends"
    KILLED = "killed"
    SUSPENDED = "suspended"


class Rewinding:
    """
    One ``dstl rewind``, begun when made.

    Args:
        storage: URL of the storage.
        environment: What its environment has beside this process's.
        job: The job.
        checkpoint_id: The checkpoint to which it is set back.
    """

    def __init__(self, storage: str, environment: Mapping[str, str], job: str, checkpoint_id: int) -> None:
        arguments = ["rewind", "--storage", storage, "--checkpoint", str(checkpoint_id), "--write", job]
        self._process = context.Process(target=_rewind, args=(arguments, dict(environment)), daemon=True)
        self._process.start()

    def meet(self, fate: Fate, after_s: float) -> bool:
        """Let it run for a while, or to its end; tell whether it did what it was told to do."""
        if fate is not Fate.ENDS:
            time.sleep(after_s)  # the moment is the test's input
            if self._process.is_alive() and self._process.pid is not None:
                os.kill(self._process.pid, signal.SIGKILL if fate is Fate.KILLED else signal.SIGSTOP)
            if fate is Fate.SUSPENDED:
                return False
        return self.end()

    def wake(self) -> None:
        """Let a suspended one go on."""
        if self.is_running() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def is_running(self) -> bool:
        """Say whether it has not ended yet; a suspended one has not."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()

    def end(self) -> bool:
        """Wait until it has ended; tell whether it did what it was told to do."""
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
