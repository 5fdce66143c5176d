"""Waits until a query has ended; tells when it is being stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pyspark.sql.streaming import StreamingQuery

_LOOK_EVERY_S = 1


def await_end(query: StreamingQuery, stopping: Callable[[], None]) -> None:
    """
    Wait until a query has ended, however it ends.

    Args:
        query: The query.
        stopping: Called when it is being stopped: Spark's `stop` waits for the batch, which may wait for a sink
            or for tables. The caller that stops it may hold Spark's own handle, for example of ``spark.streams``.
    """
    with suppress(Exception):  # the query's own error, which its other waiters get, or a stopped Spark
        while query.isActive and not query.awaitTermination(_LOOK_EVERY_S):
            pass
        stopping()
        query.awaitTermination()
