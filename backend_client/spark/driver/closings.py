"""
The watermark at which a batch is closed, the same if another driver executes it again.

Output that a function has written before the checkpoint may be there without it. The batch is then executed again by
the next driver, and a sink that has seen its id leaves it out. So the second execution must emit the same: what it
emitted less would come again in a later batch, and what it emitted more would be lost. Its rows are those of Spark's
offsets entry, but Spark's tracker may answer otherwise: it forgets at a restart how far each of several inputs was, and
the query may have another delay by then. So the watermark is noted before output is seen.
"""

from __future__ import annotations

from backend_client.batch_time import BatchTime
from backend_client.spark.driver.batch_times import BatchTimes
from backend_client.spark.start.spark_checkpoint import CheckpointLog
from dstl_service.wire import CheckpointRef


class Closings:
    """
    Determines the watermarks at which a query's batches are closed.

    Args:
        times: The times of the query's batches.
        log: Its Spark checkpoint.
        first: The id of the first batch that was not planned before the query's start.
        is_seen_early: Whether output is seen before its checkpoint exists.
    """

    def __init__(self, times: BatchTimes, log: CheckpointLog, first: int, *, is_seen_early: bool) -> None:
        self._times = times
        self._log = log
        self._first = first
        self._is_seen_early = is_seen_early

    def closed_ms(
        self, batch_id: int, base: CheckpointRef | None, time: BatchTime | None
    ) -> tuple[int | None, int | None]:
        """Return what `BatchTimes.closed_ms` does, of a batch that may have been executed by an earlier driver."""
        if time is None or not self._is_seen_early or not self._times.has_watermark():
            return self._times.closed_ms(time)
        before = base.uid if base is not None else ""
        noted = self._log.closed(batch_id, before) if batch_id < self._first else None
        if noted is not None:
            return self._times.seen_ms(*noted)
        closed_ms, seen_ms = self._times.closed_ms(time)
        self._log.note_closed(batch_id, before, closed_ms)
        return closed_ms, seen_ms
