"""The pinning of partitions to their executors, apart from Spark's part in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backend_client.settings import BackendSettings
from backend_client.spark.places.pinning import LOCALITY_WAIT, REDUCE_LOCALITY, hosts_of


class Session:
    """A Spark session."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    @property
    def sparkContext(self) -> Any:
        return self

    def getConf(self) -> dict[str, str]:
        return self.settings

    def newSession(self) -> Any:
        return self

    @property
    def conf(self) -> Any:
        return SimpleNamespace(set=lambda *_: None)


@pytest.mark.parametrize(
    ("mode", "settings", "said"),
    [
        ("deferred", {"spark.master": "spark://driver:7077"}, REDUCE_LOCALITY),
        ("bounded-loss", {"spark.master": "yarn", REDUCE_LOCALITY: "false", LOCALITY_WAIT: "0s"}, LOCALITY_WAIT),
        ("deferred", {"spark.master": "yarn", REDUCE_LOCALITY: "false"}, None),
        ("deferred", {"spark.master": "local[2]"}, None),
        ("exact", {"spark.master": "yarn"}, None),
    ],
)
def test_failover_without_pinned_partitions_is_told(
    mode: str, settings: dict[str, str], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A start warns if rows would wait for tables that the next batch does not find, and names the setting."""
    session: Any = Session(settings)

    hosts = hosts_of(session, BackendSettings("file:///s", "job", failover=mode))

    assert (hosts is None) == (settings["spark.master"].startswith("local") or said is not None or mode == "exact")
    told = [line for line in caplog.messages if "rows may wait" in line]
    assert len(told) == (said is not None)
    assert all(str(said) in line and mode in line for line in told)
