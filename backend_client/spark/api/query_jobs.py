"""The jobs of a backend's queries, and the listeners to their batches."""

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
    """Keeps the figures of the most recent batches and passes them to listeners."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[BatchProgress], None]] = []
        self.recent: deque[BatchProgress] = deque(maxlen=_PROGRESS_KEPT)

    def __call__(self, progress: BatchProgress) -> None:
        """Record a batch's figures. The batch is already complete, so a listener's exception is only logged."""
        self.recent.append(progress)
        logger.info("%s", progress.to_text())
        for listener in self.listeners:
            try:
                listener(progress)
            except Exception:
                logger.exception("an on_progress listener failed after batch %d", progress.batch_id)


class QueryJobs:
    """
    Assigns a job to each query.

    Args:
        settings: The backend's settings, with its job.
        reports: Gets the figures of every batch of every query.
    """

    def __init__(self, settings: BackendSettings, reports: ProgressReports) -> None:
        self.settings = settings
        self.reports = reports
        self._has_one_per_query = False
        self._unnamed: list[StreamingQuery] = []

    def one_per_query(self) -> QueryJobs:
        """Return a copy that gives each named query its own job."""
        jobs = QueryJobs(self.settings, self.reports)
        jobs._has_one_per_query, jobs._unnamed = True, self._unnamed
        return jobs

    def settings_for(self, query_name: str | None) -> BackendSettings:
        """
        Return the settings, with the job, for a query that is about to start.

        Raises:
            InvalidInputError: The name cannot be part of a job name, or another unnamed query is running.
        """
        if not self._has_one_per_query:
            return self.settings
        if query_name is None:
            if any(query.isActive for query in self._unnamed):
                raise InvalidInputError(
                    f"another query without a name already keeps its state in job {self.settings.job!r}; name the "
                    "queries with queryName(…), so that each has its own job"
                )
            return self.settings
        return replace(self.settings, job=f"{self.settings.job}.{query_name}")

    def started(self, query: StreamingQuery) -> None:
        """Register a running query."""
        if not query.name:
            self._unnamed[:] = [known for known in (*self._unnamed, query) if known.isActive]
