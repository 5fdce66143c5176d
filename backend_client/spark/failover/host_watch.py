"""
Has Spark give up the executors of hosts that fall silent: cut off from the network, switched off, or hanging.

Such a host closes no connection, so Spark itself waits for its time-outs, which must be longer than the pauses of a
JVM. The sidecar of each host sends a heartbeat over its link; after three that did not come the coordinator lists the
host, and the driver asks for that list. A process that dies closes its connections, and Spark knows at once.

If several hosts fall silent and at most one other is left, the driver's host is more likely the one that is cut off: no
executor is given up then, as the links are back sooner than lost tables. Spark's own time-outs decide.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial

from pyspark.sql import SparkSession

from backend_client.service.client import ServiceClient
from backend_client.service.host_link import silent_hosts
from backend_client.service.job_session import connect_as
from backend_client.settings import BackendSettings
from backend_client.spark.failover.operator_jobs import OperatorJobs
from backend_client.spark.private.located import executor_addresses, executors_at, kill_tasks, remove_executor
from storage.errors import UnavailableError

logger = logging.getLogger("backend_client")

_EVERY_S = 0.3
_SUSPECTED_EVERY_S = 0.1
"""While a host is silent that has not been given up."""
LOOKS = 7
"""Looks at which a host must be silent, which is 0.6 s: links fall silent one after the other, not at once."""
_REMOVED_WITHIN_S = 1.0
_REMOVED_PAUSE_S = 0.02

Executors = Iterable[tuple[str, str]]
"""Id and host of each executor."""


class HostWatch:
    """
    Watches the hosts of a query, in a thread of its own.

    Args:
        silent: Returns the addresses of silent hosts; `UnavailableError` if that is not known.
        executors: Returns the executors; None if they are not known.
        remove: Has Spark give up the executor with this id, for a reason.
        restart: Has Spark run the running tasks of a group of jobs again, for a reason; returns their number.
        close: Is called when it watches no longer.
    """

    def __init__(
        self,
        silent: Callable[[], Collection[str]],
        executors: Callable[[], Executors | None],
        remove: Callable[[str, str], None],
        restart: Callable[[str, str], int],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._silent = silent
        self._executors = executors
        self._remove = remove
        self._restart = restart
        self._close = close
        self._group: str | None = None
        self._given_up: set[str] = set()
        self._looks = Counter[str]()
        self._is_cut_off = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, group: str | None) -> None:
        """Watch, unless it does already; `group` is that of the query's jobs."""
        self._group = group
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dstl-host-watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def look(self) -> None:
        """Give up the executors of hosts that have fallen silent since; those of a host once, until it is back."""
        silent = set(self._silent())
        self._given_up &= silent
        suspects = silent - self._given_up
        self._looks = Counter({address: self._looks[address] + 1 for address in suspects})
        news = {address for address, looks in self._looks.items() if looks >= LOOKS}
        executors = self._executors() if news else ()
        if executors is None:
            return
        hosts = {host: _addresses(host) for _, host in executors}
        was_cut_off = self._is_cut_off
        silent_count = sum(bool(suspects & addresses) for addresses in hosts.values())
        self._is_cut_off = is_driver_cut_off(len(hosts), silent_count)
        if self._is_cut_off:
            if not was_cut_off:
                logger.warning("nearly all hosts are silent: the driver's host seems cut off, no executor is given up")
            return
        self._given_up |= news
        lost = [(executor, host) for executor, host in executors if news & hosts[host]]
        for executor, host in lost:
            logger.warning("executor %s is given up: its host %s has fallen silent", executor, host)
            try:
                self._remove(executor, f"its host {host} has sent no heartbeat over its link to the driver's sidecar")
            except Exception:  # such as of a cluster manager that is cut off, too; the others are given up nevertheless
                logger.warning("executor %s could not be given up", executor, exc_info=True)
        if lost and self._group is not None:
            # One that reads rows from the host, or sends it a copy of its output, would wait for a time-out.
            killed = self._restart(self._group, "a host has fallen silent")
            logger.info("the batch, or %d running tasks of it, are started again", killed)

    def _work(self) -> None:
        while not self._ended.wait(_SUSPECTED_EVERY_S if self._looks else _EVERY_S):
            try:
                self.look()
            except UnavailableError as error:
                logger.debug("silent hosts are not known: %s", error)
            except Exception:
                logger.warning("executors of a silent host could not be given up", exc_info=True)
        self._close()


def is_driver_cut_off(hosts: int, silent: int) -> bool:
    """Return whether the driver's host seems cut off, rather than those of its executors' hosts that are silent."""
    return silent >= 2 and hosts - silent <= 1


def watch_of(spark: SparkSession, settings: BackendSettings, jobs: OperatorJobs) -> HostWatch:
    """Return the watch of a query's hosts; `jobs` are those of its operators."""
    client = connect_as(ServiceClient, settings, 0.0, may_start=False)

    def executors() -> Executors | None:
        found = executors_at(spark, executor_addresses(spark))
        return None if found is None else [(executor, host) for executor, host, _ in found]

    def remove(executor: str, reason: str) -> None:
        remove_executor(spark, executor, reason)
        until_s = time.monotonic() + _REMOVED_WITHIN_S
        while any(known == executor for known, _ in executors() or ()) and time.monotonic() < until_s:
            time.sleep(_REMOVED_PAUSE_S)  # a batch that began now would still count on it

    def restart(group: str, reason: str) -> int:
        # Tasks of the user's function, if that is running, read what other executors have, too.
        return 0 if jobs.give_up(group, reason) else kill_tasks(spark, group, reason)

    return HostWatch(partial(silent_hosts, client, settings.job), executors, remove, restart, client.close)


def _addresses(host: str) -> set[str]:
    """Return the addresses of a host by the name that Spark knows it under."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {host}
