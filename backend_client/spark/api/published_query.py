"""A query whose output is published after its checkpoints: its end waits for the last publish."""

from __future__ import annotations

import time

from pyspark.sql.streaming import StreamingQuery

from backend_client.spark.output.outputs import Output
from backend_client.spark.private.session import java_query


class PublishedQuery(StreamingQuery):
    """
    Spark's query; `stop`, `awaitTermination` and `processAllAvailable` return when everything is published.

    The last offsets are then committed, too, if the query has a consumer group that takes them.

    Each raises `UnavailableError` if the sink cannot be reached for as long as its backlog's patience. Nothing is lost:
    the next start publishes what is left.
    """

    def __init__(self, query: StreamingQuery, output: Output) -> None:
        super().__init__(java_query(query))
        self._output = output

    def stop(self) -> None:
        """Stop the query after the last publish."""
        self._output.stop_waiting()
        super().stop()
        self._output.drain()

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait until the query has ended and everything is published; with a timeout, return whether that is so."""
        begun = time.monotonic()
        ended = super().awaitTermination(timeout)
        if ended is False:
            return False
        left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        is_published = self._output.drain(left_s)
        return None if timeout is None else is_published

    def processAllAvailable(self) -> None:
        """Wait until all data that the source has now is processed and published."""
        super().processAllAvailable()
        self._output.drain()
