"""
An operator's output, computed once and kept on the executors for all who read it in this batch.

Not in Spark's cache of frames: that belongs to the user, whose ``clearCache()`` empties it, and what was computed again
behind it would be another attempt's. A local checkpoint's blocks are found by nobody else, and it has no lineage: what
is lost is an error, never computed again in silence.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from backend_client.spark.private.session import local_checkpoint

LOST_BLOCK = "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND"
"""What Spark calls the loss of a kept block."""


class KeptOutput:
    """Keeps the rows of a frame, which are computed with the first action on `frame`."""

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame.localCheckpoint(eager=False)
        self._blocks: Any = local_checkpoint(self.frame)

    def release(self) -> None:
        """Let the executors forget the rows."""
        # Asked of the blocks themselves, Spark would warn in each batch that they cannot be computed again.
        self._blocks.sparkContext().unpersistRDD(self._blocks.id(), False)
