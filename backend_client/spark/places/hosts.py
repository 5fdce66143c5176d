"""
The hosts of an application, and the frames that lead a query's partitions to them.

Spark has no affinity of partitions to executors, but it schedules a task where an RDD that it reads says. An *anchor*
is a frame with one row per partition whose RDD names, for each partition, its executor first and, with standbys, the
host with its table's copy second. A batch's rows are joined to it by partition number, which moves no row. As long as
the executor is there it is preferred; when it is gone the copy's host is, already within the batch.

An executor that joins later is *cold*: its first task starts Python and loads and compiles the code of all tasks,
for seconds. It gets no partition until a small job beside the batches has done so.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client.spark.failover.rehearsal import failing
from backend_client.spark.places.seats import Executor, Seats, Takeover, locations, seated, takeover
from backend_client.spark.private.located import (
    executor_addresses,
    executor_ids,
    executor_location,
    executors_at,
    located,
)

PARTITION_COLUMN = "__dstl_partition"
"""The column of a row's partition number, in anchors and in rows that are joined to them."""

logger = logging.getLogger("backend_client")


@dataclass(frozen=True, slots=True)
class _Anchor:
    seats: Seats | None
    executors: Sequence[Executor]
    frame: DataFrame


class Hosts:
    """
    Where the partitions of a query run, and where copies of its tables are kept. Thread-safe.

    Args:
        spark: A session of its own, without adaptive execution.
        keeps_copies: Whether there are standbys.
    """

    def __init__(self, spark: SparkSession, *, keeps_copies: bool) -> None:
        self._spark = spark
        self._keeps_copies = keeps_copies
        self._lock = threading.Lock()
        self._seen: tuple[str, frozenset[str]] = ("", frozenset())
        self._executors: list[Executor] = []
        self._cold: list[Executor] = []
        self._seats: dict[int, Seats] = {}
        self._ran: Mapping[int, Mapping[int, str]] = {}
        self._homes: dict[int, dict[int, str]] = {}
        self._anchors: dict[int, _Anchor] = {}
        self._apart: dict[int, tuple[_Anchor, list[DataFrame]]] = {}
        self._has_warned = False

    def look(self, ready: Collection[str] = ()) -> None:
        """
        Look up the executors, and decide again where partitions run.

        Args:
            ready: Hosts with complete and recent copies of the query's tables.
        """
        with self._lock:
            self._look()
            cores = self._cores
            if not cores:
                return
            if self._keeps_copies and len(cores) == 1 and not self._has_warned:
                self._has_warned = True
                logger.warning("standby_replicas: no copies until a second host joins, %s is the only one", *cores)
            for parallelism in self._seats:
                self._seat(parallelism, cores, ready)

    @property
    def executor_ids(self) -> frozenset[str]:
        """The ids of the executors, as of the last look."""
        with self._lock:
            return frozenset(executor.id for executor in self._executors)

    @property
    def cold(self) -> list[Executor]:
        """The executors that have run nothing yet, as of the last look."""
        with self._lock:
            return list(self._cold)

    def warmed(self, executors: Collection[Executor]) -> None:
        """Give partitions to these executors from the next look on."""
        with self._lock:
            self._cold = [executor for executor in self._cold if executor not in executors]

    def ran(self, places: Mapping[int, Mapping[int, str]]) -> None:
        """
        Take the hosts on which partitions have run, by their number: there they go on if their own host is lost.

        An executor alone on its host is not cold any more if something has run there.
        """
        with self._lock:
            self._ran = places
            self._cold = self._not_used(self._cold, self._executors)

    def seats(self, parallelism: int) -> Seats | None:
        """Return the places of `parallelism` partitions, as decided last; None as long as there is no executor."""
        with self._lock:
            return self._known_seats(parallelism)

    def takeover(self, parallelism: int) -> Takeover | None:
        """Return which of `parallelism` partitions hosts with less than their share should take over; None for none."""
        with self._lock:
            seats, cores = self._seats.get(parallelism), self._cores
            if seats is None or not set(seats.runners) <= cores.keys():
                return None
            return takeover(seats, cores, self._homes.get(parallelism, {}))

    def take_over(self, parallelism: int, takeover: Takeover) -> None:
        """Run partitions at their new places from the next batch on."""
        with self._lock:
            now = self._seats[parallelism] = takeover.applied(self._seats[parallelism])
            logger.info("places of %d partitions: %s", parallelism, _summary(now))

    def pin(self, rows: DataFrame, parallelism: int) -> DataFrame:
        """Lead rows that are partitioned by `PARTITION_COLUMN` to their partitions' places."""
        return _pinned(rows, self.anchor(parallelism))

    def anchor(self, parallelism: int) -> DataFrame:
        """Return a frame with the number of each partition, alone in this partition, at its places."""
        with self._lock:
            return self._anchor(parallelism).frame

    def anchors_apart(self, parallelism: int) -> Sequence[DataFrame]:
        """Return a frame for each of `parallelism` partitions: its number alone, in one partition, at its places."""
        with self._lock:
            anchor = self._anchor(parallelism)
            known = self._apart.get(parallelism)
            if known is None or known[0] is not anchor:
                places = [[]] * parallelism if anchor.seats is None else _named(anchor.seats, anchor.executors)
                frames = [self._alone(number, named) for number, named in enumerate(places)]
                known = self._apart[parallelism] = anchor, frames
            return known[1]

    def frame_of(self, partitions: Sequence[int], parallelism: int, seats: Seats | None = None) -> DataFrame:
        """
        Return a frame with one row for each of these partitions, in a partition of its own at its places.

        The value is the partition's index in `partitions`.

        Args:
            partitions: Their numbers.
            parallelism: The number of all partitions.
            seats: Other places than the present ones.
        """
        with self._lock:
            return self._frame_of(partitions, seats if seats is not None else self._known_seats(parallelism))

    def frame_at(self, hosts: Sequence[str], executors: Collection[Executor] = ()) -> DataFrame:
        """Return a frame of numbers with one partition for each of these places, whose task prefers it."""
        places = [*hosts, *(executor_location(executor.id, executor.host) for executor in executors)]
        numbers = self._numbers(len(places))
        anchor = located(numbers, [[place] for place in places])
        # A join and a sort, as in a batch, and an error, as after a loss: what they need is loaded, too.
        joined = _pinned(numbers, anchor).sortWithinPartitions(PARTITION_COLUMN)
        return joined.selectExpr(PARTITION_COLUMN, failing(PARTITION_COLUMN))

    @property
    def _warm(self) -> list[Executor]:
        return [executor for executor in self._executors if executor not in self._cold] or self._executors

    @property
    def _cores(self) -> Counter[str]:
        cores = Counter[str]()
        for executor in self._warm:
            cores[executor.host] += max(1, executor.cores)
        return cores

    def _known_seats(self, parallelism: int) -> Seats | None:
        if parallelism not in self._seats:
            if not self._executors:
                self._look()
            cores = self._cores
            if not cores:
                return None
            self._seats[parallelism] = seated(parallelism, cores, None, keeps_copies=self._keeps_copies)
        return self._seats[parallelism]

    def _seat(self, parallelism: int, cores: Mapping[str, int], ready: Collection[str]) -> None:
        before, ran = self._seats[parallelism], self._ran.get(parallelism)
        now = seated(parallelism, cores, before, ready, ran, keeps_copies=self._keeps_copies)
        if now != before:
            logger.info("places of %d partitions: %s", parallelism, _summary(now))
        homes = self._homes.setdefault(parallelism, {})
        homes.update({at: host for at, host in enumerate(before.runners) if host not in cores})
        self._seats[parallelism] = now

    def _anchor(self, parallelism: int) -> _Anchor:
        seats = self._known_seats(parallelism)
        anchor = self._anchors.get(parallelism)
        if anchor is None or anchor.seats != seats or anchor.executors != self._warm:
            frame = self._frame_of(range(parallelism), seats)
            anchor = self._anchors[parallelism] = _Anchor(seats, self._warm, frame)
        return anchor

    def _frame_of(self, partitions: Sequence[int], seats: Seats | None) -> DataFrame:
        numbers = self._numbers(len(partitions))
        if seats is None:
            return numbers
        named = _named(seats, self._warm)
        return located(numbers, [named[at] for at in partitions])

    def _alone(self, number: int, places: Sequence[str]) -> DataFrame:
        alone = numbers_apart(self._spark, 0, 1)
        return (located(alone, [places]) if places else alone).selectExpr(f"{number} as {PARTITION_COLUMN}")

    def _numbers(self, count: int) -> DataFrame:
        numbers = self._spark.range(count).select(F.col("id").cast("int").alias(PARTITION_COLUMN))
        return numbers.repartitionById(count, PARTITION_COLUMN)

    def _not_used(self, cold: Sequence[Executor], all_: Sequence[Executor]) -> list[Executor]:
        """Return those that have run nothing as far as known: they are not alone on a host on which something ran."""
        ran = {host for hosts in self._ran.values() for host in hosts.values()}
        count = Counter(executor.host for executor in all_)
        return [executor for executor in cold if executor.host not in ran or count[executor.host] > 1]

    def _look(self) -> None:
        addresses, ids = executor_addresses(self._spark), executor_ids(self._spark)
        if (addresses, ids) == self._seen:
            return
        found = executors_at(self._spark, addresses)
        # Else Spark has not recorded a new one yet, or a lost one whose address another has; the next batch sees it.
        if found is not None and {executor for executor, _, _ in found} <= ids:
            now, before = [Executor(*executor) for executor in found], self._executors
            known = [executor for executor in before or now if executor not in self._cold]
            new = [executor for executor in now if executor not in known]
            # A task that ran on a host may have run on another executor that was there.
            came = {executor.host for executor in new} - {executor.host for executor in before}
            self._cold = [one for one in new if one.host not in came]
            self._cold += self._not_used([one for one in new if one.host in came], now)
            self._seen, self._executors = (addresses, ids), now


def numbers_apart(spark: SparkSession, begin: int, end: int) -> DataFrame:
    """Return a frame of the numbers from `begin` up to `end`, exclusive, each in a partition of its own, unpinned."""
    return spark.range(begin, end, 1, end - begin).select(F.col("id").cast("int").alias(PARTITION_COLUMN))


def _named(seats: Seats, executors: Sequence[Executor]) -> list[list[str]]:
    """Return the locations of each partition, as Spark names them."""
    places = locations(seats, executors)
    return [[executor_location(*place) for place in of_partition] for of_partition in places]


def _pinned(rows: DataFrame, anchor: DataFrame) -> DataFrame:
    # The rows come first: a join belongs to its left side's session, and each query has its own.
    return rows.join(anchor.hint("shuffle_hash"), PARTITION_COLUMN)


def _summary(seats: Seats) -> str:
    hosts = sorted({*seats.runners, *(host for host in seats.keepers if host is not None)})
    counts = (f"{host} runs {seats.runners.count(host)}, keeps {seats.keepers.count(host)}" for host in hosts)
    return "; ".join(counts)
