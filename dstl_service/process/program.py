"""
Stops an auto-started sidecar whose program was removed or replaced.

Spark unpacks an environment (``--archives``) into folders that the cluster manager deletes with the application, and
an upgrade replaces files in place. The sidecar outlives both, and what it imports later, such as for a compaction,
would be missing or of another version. Whoever needs a sidecar next starts one from a program that exists.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

import dstl_service

_CHECK_S = 10.0
_CHECKS_MIN, _CHECKS_MAX = 2, 30
"""How many checks in a row must miss the program: one may fail; and how many at most wait for work to end."""

logger = logging.getLogger("dstl_service")


class ProgramWatch:
    """
    Calls `stop_process` when a file of the program is no longer the one that this process was started from.

    It waits until the process is not in use, at most five minutes. Owned by the event loop.

    Args:
        stop_process: Stops the process in an orderly way.
        is_in_use: Says whether requests or background work run.
        file: A file of the program.
    """

    def __init__(
        self,
        stop_process: Callable[[], None],
        is_in_use: Callable[[], bool],
        file: Path = Path(dstl_service.__file__),
    ) -> None:
        self._stop_process = stop_process
        self._is_in_use = is_in_use
        self._file = file
        self._identity = _identity(file)
        self._missed = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the watch, unless the program is not in files."""
        if self._identity is not None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def stop(self) -> None:
        """Stop the watch."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._missed = 0 if _identity(self._file) == self._identity else self._missed + 1
        if self._missed >= _CHECKS_MAX or (self._missed >= _CHECKS_MIN and not self._is_in_use()):
            logger.warning("the program was removed or replaced; ending", extra={"path": str(self._file)})
            self._stop_process()
        else:
            self.start()


def _identity(file: Path) -> tuple[int, int] | None:
    """Return what an upgrade changes; not the inode, which some file systems give anew."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
