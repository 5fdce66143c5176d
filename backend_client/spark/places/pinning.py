"""
Whether partitions can be pinned to executors, so that their tables are local and warm.

Spark prefers the executor that a frame's RDD names only where no other rule of its own is in the way.
"""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

from backend_client.settings import EXACT, BackendSettings
from backend_client.spark.own_session import own_session
from backend_client.spark.places.hosts import Hosts

logger = logging.getLogger("backend_client")

REDUCE_LOCALITY = "spark.shuffle.reduceLocality.enabled"
LOCALITY_WAIT = "spark.locality.wait"


def hosts_of(spark: SparkSession, settings: BackendSettings) -> Hosts | None:
    """Return the places of a query's partitions; None where they are not pinned, and a warning says why."""
    obstacle = _obstacle(spark)
    if obstacle is None:
        return Hosts(own_session(spark), keeps_copies=bool(settings.standby_replicas))
    if settings.standby_replicas:
        logger.warning("standby_replicas has no effect where partitions are not pinned to executors")
    if obstacle:
        logger.warning("partitions are not pinned to executors: %s", obstacle)
    if obstacle and settings.failover != EXACT:
        logger.warning(
            "failover=%r: rows may wait until max_stall_s is over, since the next batch may run a partition where its "
            "table was not restored: %s",
            settings.failover,
            obstacle,
        )
    return None


def _obstacle(spark: SparkSession) -> str | None:
    """Return why pinning cannot work; an empty text where it is useless; None if it works."""
    conf = spark.sparkContext.getConf()
    master = conf.get("spark.master") or ""
    if master.startswith("local") and not master.startswith("local-cluster"):
        return ""
    if str(conf.get(REDUCE_LOCALITY, "true")).lower() != "false":
        return (
            f"Spark places tasks near the rows that they read; start it with --conf {REDUCE_LOCALITY}=false to keep "
            "partitions on the executors that have their tables"
        )
    if str(conf.get(LOCALITY_WAIT, "3s")).rstrip("msuhdinec ") == "0":
        return f"{LOCALITY_WAIT} is 0, so Spark uses any free executor; keep the default of 3s, or set 500ms"
    return None
