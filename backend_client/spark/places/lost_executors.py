"""
Has Spark run the tasks of a lost executor elsewhere at once, while a batch runs.

Partitions are pinned by data locality, for which Spark lets a task wait. It lets it wait for an executor that is gone,
too: until both times of locality are over, or until a new executor comes to that host, which is cold. Shorter times
would have tasks of busy executors run where their tables are not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from pyspark.sql import SparkSession

from backend_client.spark.places.hosts import Hosts
from backend_client.spark.private.located import end_waits, executor_ids
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
        end_waits: Has Spark run tasks elsewhere that wait for these.
        every_s: Time between two looks.
    """

    def __init__(
        self,
        hosts: Hosts | None,
        ids: Callable[[], frozenset[str]],
        end_waits: Callable[[Collection[str]], object],
        every_s: float = _EVERY_S,
    ) -> None:
        self._hosts = hosts
        self._ids = ids
        self._end_waits = end_waits
        self._every_s = every_s
        self._changed = threading.Condition()
        self._is_running = self._is_closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, spark: SparkSession, hosts: Hosts | None) -> LostExecutors:
        """Return that of a query."""
        return cls(hosts, partial(executor_ids, spark), partial(end_waits, spark))

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
        lost = self._hosts.executor_ids - self._ids()
        if lost:  # with each look again: first, tasks of other executors wait in the same stage
            self._end_waits(lost)
