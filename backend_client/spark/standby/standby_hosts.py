"""
The hosts of an application, and the frames that lead partitions to them.

Spark schedules a task where a block that it reads lies, or where an RDD says. So the anchor of a query with standbys is
a frame of numbers whose RDD names, for each partition, its executor first and the keeper's host second: as long as the
executor is there it is preferred, and when it is gone the keeper's host is, already within the batch.

An executor that has come later is *cold*: its first task starts Python and loads and compiles the code of all tasks,
for seconds. It gets no partition until a small job beside the batches has done so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client.spark.failover.rehearsal import failing
from backend_client.spark.private.located import (
    executor_addresses,
    executor_ids,
    executor_location,
    executors_at,
    located,
)
from backend_client.spark.standby.seats import Seats, locations, seated

logger = logging.getLogger("backend_client")


@dataclass(frozen=True, slots=True)
class _Anchor:
    places: list[list[str]]
    frame: DataFrame


class StandbyHosts:
    """
    Where partitions run and copies are kept, for all queries of a session. Thread-safe.

    Args:
        spark: A session of its own, without adaptive execution.
        column: Name of the column of partition numbers in anchors.
    """

    def __init__(self, spark: SparkSession, column: str) -> None:
        self._spark = spark
        self._column = column
        self._lock = threading.Lock()
        self._seen: tuple[str, frozenset[str]] = ("", frozenset())
        self._executors: list[tuple[str, str]] = []
        self._cold: list[tuple[str, str]] = []
        self._seats: dict[int, Seats] = {}
        self._anchors: dict[int, _Anchor] = {}
        self._ready: WeakKeyDictionary[object, frozenset[str]] = WeakKeyDictionary()
        self._has_warned = False

    def look(self, query: object, ready: Collection[str]) -> None:
        """
        Look up the executors, and decide again where partitions run.

        Args:
            query: Who asks; as long as it lives, a host takes over no partition for which it is not ready, too.
            ready: Hosts with complete and recent copies of the query's tables.
        """
        with self._lock:
            self._look()
            self._ready[query] = frozenset(ready)
            ready = frozenset.intersection(*self._ready.values())
            hosts = sorted({host for _, host in self._warm})
            if not hosts:
                return
            if len(hosts) == 1 and not self._has_warned:
                self._has_warned = True
                logger.warning("standby_replicas: no copies until a second host joins, %s is the only one", hosts[0])
            for parallelism, seats in self._seats.items():
                now = seated(parallelism, hosts, seats, ready)
                if now != seats:
                    logger.info("places of %d partitions: %s", parallelism, _summary(now))
                self._seats[parallelism] = now

    @property
    def executors(self) -> int:
        """The number of executors, as of the last look."""
        with self._lock:
            return len(self._executors)

    @property
    def cold(self) -> list[tuple[str, str]]:
        """Executor and host of those that have run nothing yet, as of the last look."""
        with self._lock:
            return list(self._cold)

    def warmed(self, executors: Collection[tuple[str, str]]) -> None:
        """Give partitions to these executors from the next look on."""
        with self._lock:
            self._cold = [executor for executor in self._cold if executor not in executors]

    def seats(self, parallelism: int) -> Seats | None:
        """Return the places of so many partitions, as they were decided last; None as long as there is no executor."""
        with self._lock:
            if parallelism not in self._seats:
                if not self._executors:
                    self._look()
                hosts = [host for _, host in self._warm]
                if not hosts:
                    return None
                self._seats[parallelism] = seated(parallelism, hosts, None)
            return self._seats[parallelism]

    def anchor(self, parallelism: int) -> DataFrame:
        """Return a frame with the number of each partition, and alone, in this partition, at its places."""
        seats = self.seats(parallelism)
        with self._lock:
            found = [] if seats is None else locations(seats, self._warm)
            places = [[executor_location(*place) for place in of_partition] for of_partition in found]
            anchor = self._anchors.get(parallelism)
            if anchor is None or anchor.places != places:
                numbers = self._spark.range(parallelism).select(F.col("id").cast("int").alias(self._column))
                numbered = numbers.repartitionById(parallelism, self._column)
                anchor = _Anchor(places, located(numbered, places) if places else numbered)
                self._anchors[parallelism] = anchor
            return anchor.frame

    def frame_at(self, hosts: list[str], executors: Collection[tuple[str, str]] = ()) -> DataFrame:
        """Return a frame of numbers with one partition for each of these places, whose task prefers it."""
        places = [*hosts, *(executor_location(*executor) for executor in executors)]
        numbers = self._spark.range(len(places)).select(F.col("id").cast("int").alias(self._column))
        numbers = numbers.repartitionById(len(places), self._column)
        anchor = located(numbers, [[place] for place in places])
        # A join and a sort, as in a batch, and an error, as after a loss: what they need is loaded, too.
        joined = numbers.join(anchor.hint("shuffle_hash"), self._column).sortWithinPartitions(self._column)
        return joined.selectExpr(self._column, failing(self._column))

    @property
    def _warm(self) -> list[tuple[str, str]]:
        return [executor for executor in self._executors if executor not in self._cold] or self._executors

    def _look(self) -> None:
        addresses, ids = executor_addresses(self._spark), executor_ids(self._spark)
        if (addresses, ids) == self._seen:
            return
        executors = executors_at(self._spark, addresses)
        # Else Spark has not recorded a new one yet, or a lost one whose address another has; the next batch sees it.
        if executors is not None and {executor for executor, _ in executors} <= ids:
            known = [executor for executor in self._executors or executors if executor not in self._cold]
            self._cold = [executor for executor in executors if executor not in known]
            self._seen, self._executors = (addresses, ids), executors


def _summary(seats: Seats) -> str:
    hosts = sorted({*seats.runners, *(host for host in seats.keepers if host is not None)})
    counts = (f"{host} runs {seats.runners.count(host)}, keeps {seats.keepers.count(host)}" for host in hosts)
    return "; ".join(counts)
