"""
The watermark at which a batch is closed, the same if another driver executes it again.

Output that a function has written before the checkpoint may be there without it. The batch is then executed again by
the next driver, and a sink that has seen its id leaves it out. So the second execution must emit the same: what it
emitted less would come again in a later batch, and what it emitted more would be lost. Its rows are those of Spark's
offsets entry, but Spark's tracker may answer otherwise: it forgets at a restart how far each of several inputs was, and
the query may have another delay by then. So the watermark is noted before output is seen, and each driver follows the
newest note. A driver that was suspended may note another watermark than its successor, which has looked before: after
its note, and before output is seen, it must hear that the job is still its own.

Of a query with one watermark it follows from the rows and the delay. So each driver notes the first batch that it
executes, with its delay for those after it, and closes that batch with the delay in the note before: a driver that is
not dead may have planned the batch at any time until Spark has started, and have written its output.
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
        is_seen_early: Whether output is seen before its checkpoint exists.
    """

    def __init__(self, times: BatchTimes, log: CheckpointLog, *, is_seen_early: bool) -> None:
        self._times = times
        self._log = log
        self._first: int | None = None
        self._is_seen_early = is_seen_early
        self.needs_owner = False
        """Whether output may be seen only if the job is still this driver's, asked after the last `closed_ms`."""

    def closed_ms(
        self, batch_id: int, base: CheckpointRef | None, time: BatchTime | None, epoch: int
    ) -> tuple[int | None, int | None]:
        """Return what `BatchTimes.closed_ms` does, of a batch that may have been executed by an earlier driver."""
        self.needs_owner = False
        delays_ms = self._times.delays_ms() if time is not None and self._is_seen_early else ()
        if not delays_ms:
            return self._times.closed_ms(time)
        delay_ms = delays_ms[0] if len(delays_ms) == 1 else None
        self._first = batch_id if self._first is None else self._first
        if delay_ms is not None and batch_id != self._first:
            return self._times.closed_ms(time)
        before_ms = self._log.closing_delay(batch_id) if delay_ms is not None else None
        closed_ms, seen_ms = self._times.closed_ms(time, before_ms if before_ms != delay_ms else None)
        self.needs_owner = True
        noted_ms = self._log.note_closed(batch_id, base.uid if base is not None else "", closed_ms, delay_ms, epoch)
        return (closed_ms, seen_ms) if noted_ms == closed_ms else self._times.seen_ms(noted_ms)
