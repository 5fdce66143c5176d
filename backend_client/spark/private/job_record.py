"""
Spark's record of an application's jobs: which have ended, and why those failed that read an RDD.

The record is Spark's status store, which lags behind the scheduler by a moment and forgets the oldest jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from backend_client.spark.private.session import needed

_SERVED_JOBS = "finding out which reads of a batch have failed needs it, and there is no substitute"
_ENDED = ("SUCCEEDED", "FAILED", "FORGOTTEN")

_known: WeakKeyDictionary[SparkContext, tuple[Any, Any, Any]] = WeakKeyDictionary()


def _of(context: SparkContext) -> tuple[Any, Any, Any]:
    """Return an application's context, scheduler and status tracker in the JVM, which stay the same."""
    found = _known.get(context)
    if found is None:
        there: Any = context._jsc
        found = _known[context] = there.sc(), there.sc().dagScheduler(), there.statusTracker()
    return found


class JobRecord:
    """
    The record of an application's jobs from now on.

    Args:
        spark: A session of the application.
        rdd: The RDD, in the JVM, whose readers count.
    """

    def __init__(self, spark: SparkSession, rdd: Any) -> None:
        self._rdd = rdd
        with needed("DAGScheduler.numTotalJobs", _SERVED_JOBS):
            self._context, self._scheduler, self._tracker = _of(spark.sparkContext)
            self._next = int(self._scheduler.numTotalJobs())
        self._newest = -1
        self._unfinished: list[int] = []
        self._failed_stages: list[int] = []

    def is_behind(self) -> bool:
        """Return whether a job has ended and its end is not recorded."""
        with needed("DAGScheduler.jobIdToActiveJob", _SERVED_JOBS):
            begun = int(self._scheduler.numTotalJobs())
            self._look([*self._unfinished, *range(self._next, begun)])
            self._next = begun
            if not self._unfinished:
                return False
            active = self._scheduler.jobIdToActiveJob()
            return any(not active.contains(number) for number in self._unfinished)

    def failures(self) -> Iterator[str]:
        """Yield why stages failed that read the RDD, of jobs whose ends were recorded when this was asked last."""
        with needed("AppStatusStore.lastStageAttempt", _SERVED_JOBS):
            for stage in self._failed_stages:
                yield self._failure(stage)

    def _look(self, numbers: list[int]) -> None:
        """Take in what is recorded of jobs that had not ended."""
        statuses: dict[int, str] = {}
        # The newest first: what is recorded meanwhile must not make an older job, looked up before it, a forgotten one.
        for number in reversed(numbers):
            info = self._tracker.getJobInfo(number)
            if info is not None:
                statuses[number] = str(info.status().toString())
                self._failed_stages += info.stageIds() if statuses[number] == "FAILED" else []
        self._newest = max([self._newest, *statuses])
        # Jobs after the newest recorded one are not recorded yet; others without a record are forgotten.
        missing = {number: "" if number > self._newest else "FORGOTTEN" for number in numbers}
        self._unfinished = [number for number, status in {**missing, **statuses}.items() if status not in _ENDED]

    def _failure(self, stage: int) -> str:
        try:
            attempt = self._context.statusStore().lastStageAttempt(stage)
        except Py4JJavaError:  # Spark has forgotten the stage
            return ""
        return str(attempt.failureReason()) if attempt.rddIds().contains(self._rdd.id()) else ""
