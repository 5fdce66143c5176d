"""
Changes the parallelism of operators while their query runs.

A request first prepares the tables of the new partitions beside the batches: a few at a time, on the executors on which
the new anchors place them, twice, so that the second pass only adds the changes of the batches meanwhile. The next
batch then runs with the new parallelism, and its tables lack only the changes since the second pass.

A step begins when a batch has ended: until Spark has planned the next one, its executors have nothing to do. In the
middle of a batch the step would hold a core for which that batch waits. After each step there is a pause twice as long
as its tasks took, so that batches have the executors for themselves for two thirds of the time. Their wait for a core
does not count: where batches leave none free, the query needs the partitions most.

A failed preparation costs time, never correctness: the batch that switches then restores its tables itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError
from storage.key_groups import check_parallelism

logger = logging.getLogger("backend_client")

PASSES = 2
_PAUSE = 2
"""How long a pause is, in steps."""
_BATCH_S_MAX = 5.0
"""A step waits no longer for the end of a batch: one that takes longer hardly notices it, and preparations end."""

Prepare = Callable[[str, int], Iterable[float]]
"""
Returns the steps that make the tables of an operator, by their name, ready for a parallelism.

Each step blocks, and is the number of seconds for which it had cores.
"""


class Rescaling:
    """
    The requests to change the parallelism of a query's operators. Thread-safe.

    Args:
        infos: The query's operators; requests name them as the query does.
        max_parallelism: The job's number of key groups.
        prepare: Prepares tables; runs in a thread of its own, once at a time.
    """

    def __init__(self, infos: Sequence[OperatorInfo], max_parallelism: int, prepare: Prepare) -> None:
        self._current = {info.label: info.parallelism for info in infos}
        self._tables = {info.label: info.name for info in infos}
        self._max_parallelism = max_parallelism
        self._prepare = prepare
        self._lock = threading.Lock()
        self._wanted: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._followed: dict[str, tuple[int, str]] = {}
        self._worker: threading.Thread | None = None
        self._closed = threading.Event()
        self._between = threading.Event()
        """Set while no batch runs."""
        self._between.set()

    @property
    def parallelism(self) -> dict[str, int]:
        """The parallelism of the newest batch, by operator."""
        with self._lock:
            return dict(self._current)

    @property
    def is_changing(self) -> bool:
        """Whether a request is being prepared, or waits for the next batch."""
        with self._lock:
            return bool(self._wanted or self._ready)

    def request(self, operator: str, parallelism: int) -> None:
        """
        Request a parallelism for one of the batches to come; a later request replaces an earlier one.

        The present number only withdraws an earlier request.

        Raises:
            InvalidInputError: The query has no such operator, or the job has fewer key groups.
        """
        check_parallelism(parallelism, self._max_parallelism)
        with self._lock:
            if operator not in self._current:
                raise InvalidInputError(
                    f"the query has no stateful operator {operator!r}; it has {', '.join(sorted(self._current))}"
                )
            self._ready.pop(operator, None)
            self._wanted.pop(operator, None)
            if parallelism == self._current[operator]:
                return  # else a preparation would use the tables that batches use
            self._wanted[operator] = parallelism
            if self._worker is None and not self._closed.is_set():
                self._worker = threading.Thread(target=self._work, name="dstl-rescale", daemon=True)
                self._worker.start()

    def follow(self, wanted: Mapping[str, int], requests: Mapping[str, str]) -> None:
        """
        Request what an administrator has requested through the coordinator, each request once.

        Args:
            wanted: The numbers, by operator.
            requests: The ids of these requests; a coordinator of an earlier version has none.
        """
        asked = {operator: (number, requests.get(operator, "")) for operator, number in wanted.items()}
        news = {operator: request for operator, request in asked.items() if self._followed.get(operator) != request}
        self._followed.update(news)
        for operator, (parallelism, _) in news.items():
            try:
                self.request(operator, parallelism)
            except InvalidInputError as error:
                logger.warning("a request for another parallelism is ignored: %s", error)

    def taken(self, infos: Sequence[OperatorInfo]) -> list[OperatorInfo]:
        """Return the operators with the parallelism of the batch that begins; prepared requests take effect with it."""
        self._between.clear()
        with self._lock:
            ready, self._ready = self._ready, {}
            for operator, parallelism in ready.items():
                logger.info(
                    "operator %s now runs with %d partitions, before with %d",
                    operator,
                    parallelism,
                    self._current[operator],
                )
            self._current.update(ready)
            return [replace(info, parallelism=self._current[info.label]) for info in infos]

    def batch_ended(self) -> None:
        """Let a step of a preparation begin: executors have nothing to do until Spark has planned the next batch."""
        self._between.set()

    def close(self) -> None:
        """Accept no request any more; a running preparation ends after its current step."""
        with self._lock:
            self._closed.set()
            self._between.set()
            self._wanted.clear()
            self._ready.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._worker = None
                    return
                operator, parallelism = next(iter(self._wanted.items()))
            table = self._tables[operator]
            try:
                steps = chain.from_iterable(self._prepare(table, parallelism) for _ in range(PASSES))
                while self._is_time_for_step(operator, parallelism) and (seconds := next(steps, None)) is not None:
                    logger.debug("tables of operator %s are prepared, in %.1f s", operator, seconds)
                    self._closed.wait(_PAUSE * seconds)
            except Exception:
                logger.warning(
                    "the tables of operator %s could not be prepared for %d partitions; the next batch restores them",
                    operator,
                    parallelism,
                    exc_info=True,
                )
            with self._lock:
                if self._wanted.get(operator) == parallelism:  # else another request came, or the query has ended
                    del self._wanted[operator]
                    self._ready[operator] = parallelism

    def _is_time_for_step(self, operator: str, parallelism: int) -> bool:
        """Wait for the end of the batch that runs; return whether the preparation is still wanted."""
        self._between.wait(_BATCH_S_MAX)
        return self._wanted.get(operator) == parallelism
