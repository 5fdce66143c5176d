"""
An operator's output, computed once and kept on the executors for all its readers in this batch.

Spark's cache of frames does not fit: it belongs to the user, whose ``clearCache()`` empties it, and recomputed output
would be another attempt's. A local checkpoint's blocks are visible to no other code, and it has no lineage: a lost
block is an error and never silently recomputed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from backend_client.spark.driver.receipts import STALE_OUTPUT
from backend_client.spark.private.job_record import JobRecord
from backend_client.spark.private.session import local_checkpoint

LOST_BLOCK = "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND"
"""Spark's error class for a lost block of a local checkpoint."""

_LEVELS = {1: None, 2: StorageLevel.MEMORY_AND_DISK_2}
"""None is Spark's own choice. A replica is sent as bytes, so with two the rows are kept as bytes, too."""
_RECORD_TIMEOUT_S = 10.0
"""Spark drops events of an overloaded application, and records nothing of a job that fails before its start."""
_RECORD_PAUSE_S = 0.005

logger = logging.getLogger("backend_client")


class KeptOutput:
    """
    Keeps a frame's rows; the first action on `frame` computes them.

    Args:
        frame: The frame.
        replicas: How many executors have each block, as far as there are as many.
    """

    def __init__(self, frame: DataFrame, replicas: int = 1) -> None:
        self.frame = frame.localCheckpoint(eager=False, storageLevel=_LEVELS[replicas])
        self._blocks: Any = local_checkpoint(self.frame)
        self._jobs = JobRecord(frame.sparkSession, self._blocks)

    def failed_reads(self) -> Iterator[str]:
        """
        Yield why reads of the frame have failed, even if the reader has caught the error (I18).

        Spark remembers all jobs that failed. Its record lags behind by a moment, and is waited for.
        """
        until = time.monotonic() + _RECORD_TIMEOUT_S
        while self._jobs.is_behind():
            if time.monotonic() > until:
                logger.warning("Spark has not recorded how jobs of this batch ended; a loss may go unnoticed")
                break
            time.sleep(_RECORD_PAUSE_S)
        for reason in self._jobs.failures():
            if STALE_OUTPUT in reason or LOST_BLOCK in reason:
                yield reason

    def release(self) -> None:
        """Drop the rows on the executors."""
        # Unpersisting the RDD itself would log a warning in each batch that its blocks cannot be recomputed.
        self._blocks.sparkContext().unpersistRDD(self._blocks.id(), False)
