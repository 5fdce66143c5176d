"""
The driver's part of links: has its sidecar accept those of the other hosts, if there are other hosts.

An auto-started sidecar has no address. Over a link, which it opens itself, the coordinator has it store the
change sets of all tasks of its host as one object per checkpoint.
"""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from backend_client.spark.failover.host_watch import HostWatch
from dstl_service.wire import LinkAddress
from storage.errors import DstlError

logger = logging.getLogger("backend_client")

_GROUP = "spark.jobGroup.id"
"""The thread that runs a query's batches has this property."""


class HostLinks:
    """
    The address to which the hosts of a query connect.

    Args:
        spark: Says whether there are other hosts, and where they reach the driver.
        session: The query's ownership of its job.
        settings: The query's settings.
        watch: Is begun when hosts have links.
    """

    def __init__(self, spark: SparkSession, session: JobSession, settings: BackendSettings, watch: HostWatch) -> None:
        self._spark = spark
        self._conf = spark.sparkContext.getConf()
        self._session = session
        self._settings = settings
        self._watch = watch
        # Executors of a local master share the driver's sidecar; one that others started has an address.
        is_local = (spark.sparkContext.master or "local").startswith("local")
        self._are_of_use = settings.links and settings.host_service is None and not is_local
        self._coordinator_id: str | None = None
        self._address: LinkAddress | None = None

    def address(self, coordinator_id: str) -> LinkAddress | None:
        """
        Return the address for the tasks of a batch; None if there are no links.

        Args:
            coordinator_id: The coordinator's process; a new one listens elsewhere.
        """
        if self._are_of_use and coordinator_id != self._coordinator_id:
            host = self._host("spark.driver.host")
            bind_address = self._host("spark.driver.bindAddress") or host
            self._coordinator_id, self._address = coordinator_id, None
            try:
                self._address = self._session.open_links(host, bind_address, self._settings.link_port)
                self._watch.begin(self._spark.sparkContext.getLocalProperty(_GROUP))
            except DstlError as error:
                logger.warning("each task outside this host stores its own change sets: %s", error)
        return self._address

    def close(self) -> None:
        """Watch the hosts no longer."""
        self._watch.end()

    def _host(self, setting: str) -> str:
        """Return the host in a setting; Spark writes addresses of IPv6 in brackets."""
        return (self._conf.get(setting, "") or "").strip("[]")
