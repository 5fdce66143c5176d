"""The jobs of a backend's queries, and the listeners to their batches."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from pyspark.sql.streaming import StreamingQuery

from backend_client.progress import BatchProgress
from backend_client.settings import BackendSettings
from backend_client.spark.scaling.rescaling import Rescaling
from storage.errors import InvalidInputError
from storage.validation import validate_name

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


class Running(NamedTuple):
    """A query that was started, and what changes the parallelism of its operators."""

    query: StreamingQuery
    rescaling: Rescaling


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
        self._running: list[Running] = []

    def one_per_query(self) -> QueryJobs:
        """Return a copy that gives each named query its own job."""
        jobs = QueryJobs(self.settings, self.reports)
        jobs._has_one_per_query, jobs._running = True, self._running
        return jobs

    def are_those_of(self, other: QueryJobs) -> bool:
        """Return whether both are of one backend, however it assigns jobs to its queries."""
        return self.reports is other.reports

    def settings_for(self, query_name: str | None) -> BackendSettings:
        """
        Return the settings, with the job, for a query that is about to start.

        Raises:
            InvalidInputError: The name cannot be part of a job name, or another unnamed query is running.
        """
        if not self._has_one_per_query:
            return self.settings
        if query_name is None:
            if any(not known.query.name and known.query.isActive for known in self._running):
                raise InvalidInputError(
                    f"another query without a name already keeps its state in job {self.settings.job!r}; name the "
                    "queries with queryName(…), so that each has its own job"
                )
            return self.settings
        parent = None if self.settings.fork_of is None else f"{self.settings.fork_of}.{query_name}"
        return replace(self.settings, job=self._job_of(query_name), fork_of=parent)

    def _job_of(self, query_name: str) -> str:
        try:
            return validate_name("job", f"{self.settings.job}.{query_name}")
        except InvalidInputError as error:
            raise InvalidInputError(
                f"the query's name {query_name!r} is part of the name of its job, and {error}. Choose another "
                "queryName(…), or call transform_with_state of the backend in place of install: its job has the "
                "backend's name alone"
            ) from error

    def started(self, query: StreamingQuery, rescaling: Rescaling) -> None:
        """Register a running query."""
        self._running[:] = [known for known in (*self._running, Running(query, rescaling)) if known.query.isActive]

    def rescale(self, operator: str, parallelism: int, query_name: str | None) -> None:
        """
        Request a parallelism for an operator of a running query.

        Raises:
            InvalidInputError: No running query, or more than one, has the operator; or the parallelism is too large.
        """
        chosen = self._of_query(query_name)
        having = [known for known in chosen if operator in known.parallelism]
        if len(having) != 1:
            operators = sorted({name for known in chosen for name in known.parallelism})
            raise InvalidInputError(
                f"{len(having)} running queries of this backend have an operator {operator!r}; "
                + ("name one of them: query=…" if having else f"running operators: {', '.join(operators) or 'none'}")
            )
        having[0].request(operator, parallelism)

    def parallelism(self, query_name: str | None) -> dict[str, int]:
        """
        Return the parallelism of the newest batch by operator, over all running queries or those of a name.

        Raises:
            InvalidInputError: No running query has the name.
        """
        return {name: n for known in self._of_query(query_name) for name, n in known.parallelism.items()}

    def _of_query(self, name: str | None) -> list[Rescaling]:
        running = [known for known in self._running if known.query.isActive]
        chosen = [known.rescaling for known in running if name in (None, known.query.name)]
        if name is not None and not chosen:
            names = ", ".join(sorted(repr(known.query.name) for known in running if known.query.name))
            raise InvalidInputError(
                f"no running query of this backend is named {name!r}; those that are: {names or 'none'}. A query gets "
                "its name from queryName(…)"
            )
        return chosen
