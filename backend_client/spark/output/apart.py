"""
Spark jobs of one task each, which run side by side: where Spark speculates, their tasks get no second attempt.

Beside a task that takes longer than the others of its job, Spark begins another attempt at it, and then a third one. A
second publisher of a slot fences the first one, so none would come to an end; and a second writer at most once is
refused until Spark gives the job up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession

_JOBS_MAX = 32
_SPECULATION = "spark.speculation"

_Result = TypeVar("_Result")


def speculates(spark: SparkSession) -> bool:
    """Return whether Spark begins further attempts at tasks that are slower than the others of their job."""
    return str(spark.sparkContext.getConf().get(_SPECULATION, "false")).lower() == "true"


def run_apart(spark: SparkSession, jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """
    Run jobs beside each other, at most 32 at a time, and return their results, in any order.

    A single job runs in the caller's thread. Others run in daemon threads with the caller's properties, such as the
    group by which a query's jobs are cancelled: a process that ends waits for none of them, as it would for a pool.

    Raises:
        Exception: One of the jobs' errors, when all that had begun have ended; no other job begins after an error.
        RuntimeError: Not all jobs ran: their threads could not begin, as without a connection to the JVM.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    waiting, taking = iter(jobs), threading.Lock()
    results: list[_Result] = []
    errors: list[Exception] = []

    def next_job() -> Callable[[], _Result] | None:
        with taking:
            return next(waiting, None)

    def work() -> None:
        while not errors and (job := next_job()) is not None:
            try:
                results.append(job())
            except Exception as error:  # noqa: BLE001 - raised by the caller's thread
                errors.append(error)

    # Each has properties of its own: Spark changes them with every job.
    targets = [inheritable_thread_target(spark)(work) for _ in jobs[:_JOBS_MAX]]
    threads = [threading.Thread(target=target, name="dstl-job-apart", daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if len(results) < len(jobs):
        raise RuntimeError(f"{len(jobs) - len(results)} of {len(jobs)} Spark jobs did not run")
    return results
