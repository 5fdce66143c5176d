"""
Prepares tables beside the batches, by small Spark jobs: those of a new parallelism, and those of stalled partitions.

A few tables at a time, where their partitions' anchors are. A failed preparation costs time, never correctness: a batch
that finds no table restores it itself, or sets its rows aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from backend_client.service.job_session import JobSession
from backend_client.service.partition_table import PREPARED, TablePreparation
from backend_client.settings import BackendSettings
from backend_client.spark.own_session import own_session
from backend_client.spark.places.hosts import Hosts, numbers_apart
from backend_client.spark.places.seats import Seats, Takeover
from storage.key_groups import key_group_range

_SHARE = 4
"""A preparation uses at most one of this many cores, so that batches keep the others."""
_TASK_S = 0.1
"""A task has a core for about so much longer than its table takes."""


@dataclass(frozen=True, slots=True)
class TablePreparer:
    """
    Prepares the tables of an operator by Spark jobs.

    Args:
        spark: The query's session.
        session: The query's ownership of its job.
        settings: The job's settings.
        hosts: Where partitions run; None to leave them unpinned.
    """

    spark: SparkSession
    session: JobSession
    settings: BackendSettings
    hosts: Hosts | None

    def __call__(self, operator: str, parallelism: int) -> Iterator[float]:
        """Prepare all tables at the newest checkpoint; yield for how many seconds each job had cores."""
        return (seconds for _, seconds in self._jobs(operator, parallelism, range(parallelism)))

    def prepare_takeover(self, operator: str, takeover: Takeover) -> Iterator[Sequence[int]]:
        """Prepare tables where their partitions are taken over; yield as `prepare` does."""
        return self.prepare(operator, len(takeover.after.runners), takeover.partitions, takeover.after)

    def prepare(
        self, operator: str, parallelism: int, partitions: Sequence[int], seats: Seats | None = None
    ) -> Iterator[Sequence[int]]:
        """
        Prepare the tables of some partitions at the newest checkpoint; yield those of each job when it is done.

        Args:
            operator: The operator's name.
            parallelism: The number of all partitions.
            partitions: The numbers of these.
            seats: Other places than the present ones.
        """
        return (chosen for chosen, _ in self._jobs(operator, parallelism, partitions, seats))

    def _jobs(
        self, operator: str, parallelism: int, partitions: Sequence[int], seats: Seats | None = None
    ) -> Iterator[tuple[Sequence[int], float]]:
        """Do what `prepare` does; yield also for how many seconds each job had cores, without its wait for them."""
        own = own_session(self.spark)
        at_once = max(1, own.sparkContext.defaultParallelism // _SHARE)
        for first in range(0, len(partitions), at_once):
            base = self.session.base
            if base is None:
                return
            chosen = partitions[first : first + at_once]
            key_groups = [key_group_range(one, parallelism, self.session.max_parallelism) for one in chosen]
            task = TablePreparation(self.settings, self.session.job_uid, operator, tuple(key_groups), base)
            # One task for each: a task without a partition would take an executor's core from batches for nothing.
            if self.hosts is None:
                frame = numbers_apart(own, 0, len(chosen))
            else:
                frame = self.hosts.frame_of(chosen, parallelism, seats)
            prepared = frame.mapInArrow(task.__call__, PREPARED).collect()
            yield chosen, max((row.seconds for row in prepared), default=0.0) + _TASK_S
