"""
Prepares tables beside the batches, by small Spark jobs: those of a new parallelism, and those of stalled partitions.

A few tables at a time, where their partitions' anchors are. A failed preparation costs time, never correctness: a batch
that finds no table restores it itself, or sets its rows aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from backend_client.service.job_session import JobSession
from backend_client.service.partition_table import PREPARED, TablePreparation
from backend_client.settings import BackendSettings
from backend_client.spark.driver.placement import Pin, place_numbers
from backend_client.spark.own_session import own_session
from backend_client.spark.places.hosts import Hosts
from backend_client.spark.places.seats import Takeover

_SHARE = 4
"""A preparation uses at most one of this many cores, so that batches keep the others."""


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

    def __call__(self, operator: str, parallelism: int) -> Iterator[int]:
        """Prepare all tables at the newest checkpoint; yield the number of tables after each job."""
        return map(len, self.prepare(operator, parallelism, range(parallelism)))

    def prepare_takeover(self, operator: str, takeover: Takeover) -> Iterator[Sequence[int]]:
        """Prepare tables where their partitions are taken over; yield as `prepare` does."""
        assert self.hosts is not None
        hosts, places = self.hosts, takeover.after

        def pin(rows: DataFrame, _: int) -> DataFrame:
            return hosts.pin_to(places, rows)

        return self._prepare(operator, len(places.runners), takeover.partitions, pin)

    def prepare(self, operator: str, parallelism: int, partitions: Sequence[int]) -> Iterator[Sequence[int]]:
        """Prepare the tables of some partitions at the newest checkpoint; yield those of each job when it is done."""
        return self._prepare(operator, parallelism, partitions, None if self.hosts is None else self.hosts.pin)

    def _prepare(
        self, operator: str, parallelism: int, partitions: Sequence[int], pin: Pin | None
    ) -> Iterator[Sequence[int]]:
        own = own_session(self.spark)
        at_once = max(1, own.sparkContext.defaultParallelism // _SHARE)
        for first in range(0, len(partitions), at_once):
            base = self.session.base
            if base is None:
                return
            task = TablePreparation(
                self.settings, self.session.job_uid, operator, parallelism, self.session.max_parallelism, base
            )
            numbers = partitions[first : first + at_once]
            place_numbers(own, numbers, parallelism, pin).mapInArrow(task.__call__, PREPARED).collect()
            yield numbers
