"""The jobs of a backend's queries, and who is told of their batches."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from pyspark.sql.streaming import StreamingQuery

from backend_client.progress import BatchProgress
from backend_client.settings import BackendSettings
from storage.errors import InvalidInputError

logger = logging.getLogger("backend_client")

_PROGRESS_KEPT = 1000


class ProgressReports:
    """Keeps the figures of the last batches, and calls listeners with them."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[BatchProgress], None]] = []
        self.recent: deque[BatchProgress] = deque(maxlen=_PROGRESS_KEPT)

    def __call__(self, progress: BatchProgress) -> None:
        """Take in a batch's figures. The batch is done: what a listener raises is logged, and fails nothing."""
        self.recent.append(progress)
        logger.info("%s", progress.to_text())
        for listener in self.listeners:
            try:
                listener(progress)
            except Exception:
                logger.exception("a listener of on_progress failed behind batch %d", progress.batch_id)


class QueryJobs:
    """
    Says which job a query has.

    Args:
        settings: The backend's, with its job.
        reports: Told of each batch of each query.
    """

    def __init__(self, settings: BackendSettings, reports: ProgressReports) -> None:
        self.settings = settings
        self.reports = reports
        self._has_one_per_query = False
        self._unnamed: list[StreamingQuery] = []

    def one_per_query(self) -> QueryJobs:
        """Return the same, but that each query with a name has a job of its own."""
        jobs = QueryJobs(self.settings, self.reports)
        jobs._has_one_per_query, jobs._unnamed = True, self._unnamed
        return jobs

    def settings_for(self, query_name: str | None) -> BackendSettings:
        """
        Return the settings of a query that is about to start, with its job.

        Raises:
            InvalidInputError: The name cannot be part of a job's, or another query without a name runs.
        """
        if not self._has_one_per_query:
            return self.settings
        if query_name is None:
            if any(query.isActive for query in self._unnamed):
                raise InvalidInputError(
                    f"a query without a name keeps its state in job {self.settings.job!r} already; name queries with "
                    "queryName(…), each then has a job of its own"
                )
            return self.settings
        return replace(self.settings, job=f"{self.settings.job}.{query_name}")

    def started(self, query: StreamingQuery) -> None:
        """Take note of a running query."""
        if not query.name:
            self._unnamed[:] = [known for known in (*self._unnamed, query) if known.isActive]
