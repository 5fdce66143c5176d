"""What keeps partitions with their executors, apart from Spark's part in it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from backend_client.spark.driver.pinning import Anchors


class Session:
    """A Spark session in local mode."""

    @property
    def sparkContext(self) -> Any:
        return self

    def getConf(self) -> dict[str, str]:
        return {"spark.master": "local[2]"}


def test_sessions_end_with_their_queries() -> None:
    """A driver that makes a session for each of its queries keeps none of them."""
    session: Any = Session()
    anchors, left = Anchors.of(session), weakref.ref(session)
    assert Anchors.of(session) is anchors

    del session, anchors
    gc.collect()

    assert left() is None
