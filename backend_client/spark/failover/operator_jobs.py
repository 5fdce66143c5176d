"""
The jobs of a batch's operators, which are given up when a host falls silent, so that the batch is executed again.

The changes of that host's tasks are lost with its sidecar, so the batch must be repeated anyway. And tasks that
Spark runs again within the same stage ask that host for rows, for seconds, over connections that nobody has closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.errors import LostChangesError

logger = logging.getLogger("backend_client")


class OperatorJobs:
    """
    Whether an operator's job is running, and its end. Thread-safe.

    Args:
        cancel: Cancels the running jobs of a group.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._is_running = False
        self._given_up = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """
        Run an operator's job.

        Raises:
            LostChangesError: It was given up; the batch is to be executed again.
        """
        with self._lock:
            self._is_running, self._given_up = True, ""
        try:
            yield
        except Exception as error:
            if self._given_up:
                raise LostChangesError(f"the batch was given up: {self._given_up}") from error
            raise
        finally:
            with self._lock:
                self._is_running = False

    def give_up(self, group: str, reason: str) -> bool:
        """Cancel the job, if one is running, for a reason; return whether one was. Later jobs are not concerned."""
        with self._lock:
            if self._is_running:
                self._given_up = reason
                self._cancel(group)
            return self._is_running
