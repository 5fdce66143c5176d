"""
The settings of Spark that a query on several hosts needs for pinned partitions and fast recovery. Pure.

Spark reads them when an application starts, so they belong on `spark-submit`'s command line or in the builder of the
session. A query is correct without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend_client.spark.places.pinning import LOCALITY_WAIT, REDUCE_LOCALITY


@dataclass(frozen=True, slots=True)
class RecommendedSetting:
    """
    One setting.

    Args:
        name: Its name.
        value: The recommended value.
        reason: Its purpose.
        present: The application's value, None if it was not set.
    """

    name: str
    value: str
    reason: str
    present: str | None = None

    @property
    def is_met(self) -> bool:
        """Whether the application has this value."""
        return self.present is not None and self.present.lower() == self.value

    @property
    def option(self) -> str:
        """The setting as an option of `spark-submit`."""
        return f"--conf {self.name}={self.value}"


_HANG = "a task that hangs, with its host or alone, gets a second attempt elsewhere; only one attempt counts"
_COPY = "with standby_replicas: a partition that lost its executor waits this long for the host with its copy"
_READ = "a task that reads from a lost executor asks the driver at once, and gives up; a silent host gets 8 s in all"
_CUT = "a task that reads from, or writes to, a host that is cut off gives up after seconds instead of 120"
_PEER = "with standby_replicas: executors learn this soon which ones can keep the second copy of their output"
_REVIVE = "tasks that have waited long enough for their executor or host start this soon, not up to a second later"
_FORK = "Python workers start in milliseconds, also after a loss; the package must be installed on all hosts"
_KILL = "a task that is given up leaves its core and its table within 2 s instead of 4"
_LOSS = "an executor that stops answering is lost after 5 s instead of 120 s; raise it if pauses of Java take longer"

_SETTINGS = (
    RecommendedSetting(REDUCE_LOCALITY, "false", "partitions stay with the executors that have their tables"),
    RecommendedSetting(LOCALITY_WAIT, "500ms", "a partition waits this long for its executor, then runs elsewhere"),
    RecommendedSetting("spark.locality.wait.node", "3s", _COPY),
    RecommendedSetting("spark.scheduler.revive.interval", "100ms", _REVIVE),
    RecommendedSetting("spark.python.daemon.module", "backend_client.spark.api.worker_daemon", _FORK),
    RecommendedSetting("spark.python.task.killTimeout", "0s", _KILL),
    RecommendedSetting("spark.shuffle.io.retryWait", "0s", _READ),
    RecommendedSetting("spark.shuffle.io.maxRetries", "8", _READ),
    RecommendedSetting("spark.shuffle.io.connectionTimeout", "5s", _CUT),
    RecommendedSetting("spark.shuffle.io.connectionCreationTimeout", "1s", _CUT),
    RecommendedSetting("spark.storage.cachedPeersTtl", "1000", _PEER),
    RecommendedSetting("spark.speculation", "true", _HANG),
    RecommendedSetting("spark.speculation.minTaskRuntime", "1s", _HANG),
    RecommendedSetting("spark.speculation.interval", "100ms", _HANG),
    RecommendedSetting("spark.speculation.quantile", "0.5", _HANG),
    RecommendedSetting("spark.executor.heartbeatInterval", "1s", _LOSS),
    RecommendedSetting("spark.network.timeoutInterval", "1s", _LOSS),
    RecommendedSetting("spark.storage.blockManagerHeartbeatTimeoutMs", "5000", _LOSS),
)


def recommended_settings(present: Callable[[str], str | None] = lambda _: None) -> list[RecommendedSetting]:
    """
    Return all recommended settings.

    Args:
        present: Returns the application's value of a setting, None if it was not set.
    """
    return [RecommendedSetting(one.name, one.value, one.reason, present(one.name)) for one in _SETTINGS]
