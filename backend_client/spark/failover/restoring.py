"""
Restores the tables of stalled partitions beside the batches, so that a later batch finds them.

A few at a time, by small Spark jobs on the executors on which the partitions' anchors are. A failed restore costs time,
never correctness: the next batch finds no table, and the partition stays stalled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from storage.errors import UnavailableError

logger = logging.getLogger("backend_client")

Restore = Callable[[str, int, Sequence[int]], Iterable[Sequence[int]]]
"""Restores partitions of an operator with a parallelism; yields those that are there, after each job."""

_Table = tuple[str, int, int]
"""Operator, parallelism, partition."""


class Restoring:
    """
    The restores of one query, in a thread of their own. Thread-safe.

    Args:
        restore: Restores tables; runs once at a time.
    """

    def __init__(self, restore: Restore) -> None:
        self._restore = restore
        self._changed = threading.Condition()
        self._wanted: dict[_Table, None] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def request(self, operator: str, parallelism: int, partitions: Iterable[int]) -> None:
        """Have tables restored; one that already is being restored stays so."""
        with self._changed:
            self._wanted.update({(operator, parallelism, partition): None for partition in partitions})
            if self._wanted and self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="dstl-restore", daemon=True)
                self._thread.start()

    def is_running(self, operator: str, parallelism: int, partition: int) -> bool:
        """Return whether a table is being restored, or waits for it."""
        with self._changed:
            return not self._is_closed and (operator, parallelism, partition) in self._wanted

    def keep(self, parallelism: Mapping[str, int]) -> None:
        """Forget the tables of operators that have another parallelism now: no batch will open them."""
        with self._changed:
            self._wanted = {table: None for table in self._wanted if parallelism.get(table[0]) == table[1]}
            self._changed.notify_all()

    def wait(self) -> None:
        """
        Wait until no table is being restored.

        Raises:
            UnavailableError: The query is being stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._wanted)
            if self._wanted:
                raise UnavailableError("the query ends while tables are being restored; rows that wait for them stay")

    def close(self) -> None:
        """Begin no further restore, and end all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (table := self._next()) is not None:
            operator, parallelism, _ = table
            with self._changed:
                alike = [number for name, count, number in self._wanted if (name, count) == (operator, parallelism)]
            try:
                for restored in self._restore(operator, parallelism, alike):
                    self._forget(operator, parallelism, restored)
                    if self._is_closed:
                        return
                    if not self._is_any_wanted(operator, parallelism):
                        break
            except Exception:
                logger.warning(
                    "tables of operator %s could not be restored beside the batches", operator, exc_info=True
                )
            self._forget(operator, parallelism, alike)

    def _next(self) -> _Table | None:
        """Return a table to restore; None if there is none, and then this thread ends."""
        with self._changed:
            table = None if self._is_closed else next(iter(self._wanted), None)
            if table is None:
                self._thread = None
            return table

    def _is_any_wanted(self, operator: str, parallelism: int) -> bool:
        with self._changed:
            return any(table[:2] == (operator, parallelism) for table in self._wanted)

    def _forget(self, operator: str, parallelism: int, partitions: Iterable[int]) -> None:
        with self._changed:
            for partition in partitions:
                self._wanted.pop((operator, parallelism, partition), None)
            self._changed.notify_all()
