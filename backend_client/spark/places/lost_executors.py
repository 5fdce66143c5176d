"""
Has Spark run the tasks of a lost executor elsewhere at once, while a batch runs.

Partitions are pinned by data locality, for which Spark lets a task wait: it does so for executors that are gone, too,
if they were lost before the stage began, or while other tasks waited. Then it waits until both times of locality are
over, or until a new executor comes to that host; that one is cold. When Spark is told to look again it drops them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from backend_client.spark.places.hosts import Hosts
from backend_client.spark.private.located import executor_ids, look_again
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_EVERY_S = 0.2
"""How often executors are counted: half a millisecond of the driver's each time."""


class LostExecutors:
    """
    Watches the executors of a query's batches, in a thread of its own.

    Args:
        hosts: Where partitions run; None where they are not pinned.
        ids: Returns the ids of the executors that are there.
        look_again: Has Spark forget those that are not.
        every_s: Time between two looks.
    """

    def __init__(
        self,
        hosts: Hosts | None,
        ids: Callable[[], frozenset[str]],
        look_again: Callable[[], None],
        every_s: float = _EVERY_S,
    ) -> None:
        self._hosts = hosts
        self._ids = ids
        self._look_again = look_again
        self._every_s = every_s
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, spark: SparkSession, hosts: Hosts | None) -> LostExecutors:
        """Return that of a query."""
        return cls(hosts, lambda: executor_ids(spark), lambda: look_again(spark))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch while a batch runs."""
        if self._hosts is None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dstl-lost-executors", daemon=True)
            self._thread.start()
        self._set(is_running=True)
        try:
            yield
        finally:
            self._set(is_running=False)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _set(self, *, is_running: bool) -> None:
        with self._changed:
            self._is_running = is_running
            self._changed.notify()

    def _watch(self) -> None:
        while self._is_due():
            try:
                self._look()
            except InvalidInputError as error:
                logger.warning("tasks of lost executors may wait for spark.locality.wait: %s", error)
                return
            except Exception:
                logger.debug("the executors could not be counted", exc_info=True)  # Spark is being stopped

    def _is_due(self) -> bool:
        """Wait until a batch has run for a moment; return False at the end."""
        with self._changed:
            while not self._is_closed:
                self._changed.wait_for(lambda: self._is_running or self._is_closed)
                if not self._changed.wait_for(lambda: not self._is_running or self._is_closed, self._every_s):
                    return True
            return False

    def _look(self) -> None:
        assert self._hosts is not None
        if self._hosts.executor_ids - self._ids():
            # Again with each look: Spark keeps waiting as long as tasks of other executors have not begun.
            self._look_again()
