"""Requests more or fewer partitions for a query's operators after its batches, as `backend_client.autoscaling` says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from backend_client.autoscaling import AutoscaleRule, Autoscaling, backlog_of
from backend_client.progress import BatchProgress
from backend_client.settings import BackendSettings
from backend_client.spark.scaling.rescaling import Rescaling

logger = logging.getLogger("backend_client")


class Autoscaler:
    """
    Changes the parallelism of a query by the duration of its batches and the backlog of its sources.

    Args:
        spark: The session that started the query.
        query_id: Returns the query's id.
        settings: The job's settings.
        max_parallelism: The job's number of key groups.
        rescaling: Takes the requests.
    """

    def __init__(
        self,
        spark: SparkSession,
        query_id: Callable[[], str | None],
        settings: BackendSettings,
        max_parallelism: int,
        rescaling: Rescaling,
    ) -> None:
        self._settings = settings
        self._max_parallelism = max_parallelism
        self._spark = spark
        self._query_id = query_id
        self._rescaling = rescaling
        self._parallelism: Mapping[str, int] = {}
        self._rows_waited = False
        rule = self._rule()  # again for each batch: executors come and go
        self._autoscaling = None if rule is None else Autoscaling(rule)

    def after(self, progress: BatchProgress) -> None:
        """Request what follows from a batch; an error only costs the request."""
        if self._autoscaling is None:
            return
        try:
            self._request(self._autoscaling, progress)
        except Exception:
            logger.warning("the parallelism of job %s is not adapted after this batch", progress.job, exc_info=True)

    def _rule(self) -> AutoscaleRule | None:
        return AutoscaleRule.of(self._settings, self._spark.sparkContext.defaultParallelism, self._max_parallelism)

    def _request(self, autoscaling: Autoscaling, progress: BatchProgress) -> None:
        autoscaling.rule = self._rule() or autoscaling.rule
        before, self._parallelism = self._parallelism, self._rescaling.parallelism
        is_changing = self._rescaling.is_changing or before != self._parallelism or self._recovers(progress)
        wanted = autoscaling.after_batch(progress.total_ms, self._backlog(), self._parallelism, is_changing=is_changing)
        for operator, parallelism in wanted.items():
            logger.info(
                "batch %d of job %s took %.0f ms: operator %s is to have %d partitions, it has %d",
                progress.batch_id,
                progress.job,
                progress.total_ms,
                operator,
                parallelism,
                self._parallelism[operator],
            )
            self._rescaling.request(operator, parallelism)

    def _recovers(self, progress: BatchProgress) -> bool:
        """Return whether a batch was repeated, lacked tables, or ran what had waited for one."""
        waited, self._rows_waited = self._rows_waited, progress.rows_waiting > 0
        return progress.tries > 1 or waited or progress.rows_waiting > 0 or progress.rows_lost > 0

    def _backlog(self) -> float:
        """Return how many batches the sources held back when Spark planned the last finished batch."""
        query = self._spark.streams.get(str(self._query_id()))
        last: Any = None if query is None else query.lastProgress
        return 0.0 if last is None else backlog_of(json.loads(last.json)["sources"])
