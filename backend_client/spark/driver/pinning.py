"""
Pins partitions to executors, so that their tables are local and warm.

Spark has no affinity of partitions to executors, but it prefers the executor that holds a block which a task reads. An
*anchor* is a cached frame with one row per partition; a batch's rows are joined to it by partition number, which moves
no row. When an executor is lost, its anchors are recomputed on another one and stay there.
"""

from __future__ import annotations

import logging
import threading
from weakref import WeakKeyDictionary, ref

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backend_client.settings import EXACT
from backend_client.spark.own_session import own_session
from backend_client.spark.standby.standby_hosts import StandbyHosts

logger = logging.getLogger("backend_client")

REDUCE_LOCALITY = "spark.shuffle.reduceLocality.enabled"
LOCALITY_WAIT = "spark.locality.wait"
PARTITION_COLUMN = "__dstl_partition"
"""The column of a row's partition number, in anchors and in rows that are joined to them."""

_MEMORY_OR_DISK = StorageLevel(useDisk=True, useMemory=True, useOffHeap=False, deserialized=True)
_anchors: WeakKeyDictionary[SparkSession, dict[int, Anchors]] = WeakKeyDictionary()


class Anchors:
    """
    A session's anchors, one per partition count: equal partition numbers of equal counts share an executor.

    With standbys an anchor is not cached, but names its places: `hosts` decides on them.
    """

    def __init__(self, spark: SparkSession, hosts: StandbyHosts | None = None) -> None:
        self._spark = ref(spark)  # else the sessions of a long-lived driver would stay for ever
        self._obstacle = _obstacle(spark)
        self._frames: dict[int, DataFrame] = {}
        self._lock = threading.Lock()
        self._queries = 0
        self.hosts = hosts if self._obstacle is None else None
        if hosts is not None and self.hosts is None:
            logger.warning("standby_replicas has no effect where partitions are not pinned to executors")
        if self._obstacle:
            logger.warning("partitions are not pinned to executors: %s", self._obstacle)

    @classmethod
    def of(cls, spark: SparkSession, standby_replicas: int = 0) -> Anchors:
        """Return a session's anchors for queries with so many copies of their tables."""
        of_session = _anchors.setdefault(spark, {})
        anchors = of_session.get(standby_replicas)
        if anchors is None:
            hosts = StandbyHosts(own_session(spark), PARTITION_COLUMN) if standby_replicas else None
            anchors = of_session[standby_replicas] = cls(spark, hosts)
        return anchors

    @property
    def are_of_use(self) -> bool:
        """Whether partitions can be pinned and there is more than one executor."""
        return self._obstacle is None

    def acquire(self) -> None:
        """Count one more query that uses the anchors."""
        with self._lock:
            self._queries += 1

    def release(self) -> None:
        """Count one query less; the last one drops the anchors, since Spark keeps executors that have cached blocks."""
        with self._lock:
            self._queries -= 1
            frames = list(self._frames.values()) if not self._queries else []
            if frames:
                self._frames.clear()
        for frame in frames:
            frame.unpersist()

    def pin(self, rows: DataFrame, parallelism: int) -> DataFrame:
        """Make the executor with a partition's anchor the preferred one; rows are partitioned by `PARTITION_COLUMN`."""
        # The rows come first: a join belongs to its left side's session, and each query has its own.
        return rows.join(self.anchor(parallelism).hint("shuffle_hash"), PARTITION_COLUMN)

    def anchor(self, parallelism: int) -> DataFrame:
        """Return a frame of the numbers below `parallelism`, each alone in its partition, at that partition's place."""
        if self.hosts is not None:
            return self.hosts.anchor(parallelism)
        with self._lock:
            anchor = self._frames.get(parallelism)
            if anchor is None or not anchor.storageLevel.useMemory:  # a user's clearCache() drops them
                anchor = self._made(parallelism)
                if self._queries:  # else the query ended while its rescaling was prepared
                    self._frames[parallelism] = anchor
                else:
                    anchor.unpersist()
        return anchor

    def _made(self, parallelism: int) -> DataFrame:
        spark = self._spark()
        assert spark is not None  # the query holds it
        numbers = spark.range(parallelism).select(F.col("id").cast("int").alias(PARTITION_COLUMN))
        anchor = numbers.repartitionById(parallelism, PARTITION_COLUMN).persist(_MEMORY_OR_DISK)
        anchor.count()
        return anchor


def warn_of_failover(spark: SparkSession, mode: str) -> None:
    """Log that a failover mode is of little use where partitions are not pinned to executors."""
    obstacle = _obstacle(spark)
    if mode != EXACT and obstacle:
        logger.warning(
            "failover=%r: rows may wait until max_stall_s is over, since the next batch may run a partition where its "
            "table was not restored: %s",
            mode,
            obstacle,
        )


def _obstacle(spark: SparkSession) -> str | None:
    """Return why pinning cannot work; an empty text where it is useless; None if it works."""
    settings = spark.sparkContext.getConf()
    master = settings.get("spark.master") or ""
    if master.startswith("local") and not master.startswith("local-cluster"):
        return ""
    if str(settings.get(REDUCE_LOCALITY, "true")).lower() != "false":
        return (
            f"Spark places tasks near the rows that they read; start it with --conf {REDUCE_LOCALITY}=false to keep "
            "partitions on the executors that have their tables"
        )
    if str(settings.get(LOCALITY_WAIT, "3s")).rstrip("msuhdinec ") == "0":
        return f"{LOCALITY_WAIT} is 0, so Spark uses any free executor; keep the default of 3s, or set 500ms"
    return None
