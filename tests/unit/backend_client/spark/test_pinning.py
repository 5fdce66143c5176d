"""What keeps partitions with their executors, apart from Spark's part in it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from backend_client.spark.driver.pinning import LOCALITY_WAIT, REDUCE_LOCALITY, Anchors, warn_of_failover


class Session:
    """A Spark session, by default in local mode."""

    def __init__(self, settings: dict[str, str] | None = None) -> None:
        self.settings = settings or {"spark.master": "local[2]"}

    @property
    def sparkContext(self) -> Any:
        return self

    def getConf(self) -> dict[str, str]:
        return self.settings


def test_sessions_end_with_their_queries() -> None:
    """A driver that makes a session for each of its queries keeps none of them."""
    session: Any = Session()
    anchors, left = Anchors.of(session), weakref.ref(session)
    assert Anchors.of(session) is anchors

    del session, anchors
    gc.collect()

    assert left() is None


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

    warn_of_failover(session, mode)

    assert len(caplog.messages) == (said is not None)
    assert all(str(said) in line and mode in line for line in caplog.messages)
