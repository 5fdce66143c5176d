"""
The watermark at which a batch is closed, the same if another driver executes it again.

Output that a function has written before the checkpoint may be there without it. The batch is then executed again by
the next driver, and a sink that has seen its id leaves it out. So the second execution must emit the same: what it
emitted less would come again in a later batch, and what it emitted more would be lost. Its rows are those of Spark's
offsets entry, but Spark's tracker may answer otherwise: it forgets at a restart how far each of several inputs was, and
the query may have another delay by then. So the watermark is noted before output is seen. The first note stays: a
driver that was suspended meanwhile goes on, until its checkpoint is refused, and emits what its successor does. Of a
query with one watermark it follows from the rows and the delay: only a new delay is noted.
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
        self._noted_ms: int | None = None

    def closed_ms(
        self, batch_id: int, base: CheckpointRef | None, time: BatchTime | None
    ) -> tuple[int | None, int | None]:
        """Return what `BatchTimes.closed_ms` does, of a batch that may have been executed by an earlier driver."""
        delays_ms = self._times.delays_ms() if time is not None and self._is_seen_early else ()
        if not delays_ms:
            return self._times.closed_ms(time)
        is_new, before = batch_id >= self._first, base.uid if base is not None else ""
        if not is_new and (noted := self._log.closed(batch_id, before)) is not None:
            return self._times.seen_ms(*noted)
        if len(delays_ms) == 1:
            return self._times.closed_ms(time, self._delay_ms(*delays_ms, is_new=is_new))
        closed_ms, seen_ms = self._times.closed_ms(time)
        noted_ms = self._log.note_closed(batch_id, before, closed_ms)
        return (closed_ms, seen_ms) if noted_ms == closed_ms else self._times.seen_ms(noted_ms)

    def _delay_ms(self, delay_ms: int, *, is_new: bool) -> int | None:
        """Return the delay with which an earlier driver may have closed a batch, if it was another one."""
        if self._noted_ms is None:
            self._noted_ms = self._log.closing_delay()
        if not is_new and self._noted_ms is not None:
            return self._noted_ms if self._noted_ms != delay_ms else None
        if self._noted_ms != delay_ms:  # the driver that planned the batch may have died before it noted its own
            self._log.note_closing_delay(delay_ms)
            self._noted_ms = delay_ms
        return None
