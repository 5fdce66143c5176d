"""
The time of a batch: what Spark wrote down before it ran the batch, so that it is the same when the batch runs again.

Spark's own tracker computes the watermark (delays, several inputs, policy, restarts); it stands in the offsets entry of
the batch, beside the batch's processing time. No I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

from storage.errors import CorruptDataError, InvalidInputError


class TimeMode(Enum):
    """What an operator's timers follow, by Spark's names."""

    NONE = "None"
    PROCESSING = "ProcessingTime"
    EVENT = "EventTime"

    @classmethod
    def of(cls, text: str) -> Self:
        """
        Read a mode in any case, as Spark does.

        Raises:
            InvalidInputError: There is no such mode.
        """
        for mode in cls:
            if text.lower() == mode.value.lower():
                return mode
        raise InvalidInputError(f"timeMode must be 'None', 'ProcessingTime' or 'EventTime', it is {text!r}")


@dataclass(frozen=True, slots=True)
class BatchTime:
    """
    Times of one batch in ms since 1970.

    `watermark_ms` is the one that the batches before led to, 0 without any; `previous_watermark_ms` that of the batch
    before, or the one at which that was closed.
    """

    timestamp_ms: int
    watermark_ms: int
    previous_watermark_ms: int

    @classmethod
    def read(cls, offsets: str, previous_offsets: str | None, closed_ms: int | None = None) -> Self:
        """
        Read Spark's offsets entries of a batch and of the batch before it, which was closed at a watermark or was not.

        Raises:
            CorruptDataError: They are not as Spark writes them.
        """
        metadata = _metadata(offsets)
        previous = _metadata(previous_offsets) if previous_offsets else {"batchWatermarkMs": 0}
        try:
            time = cls(
                timestamp_ms=int(metadata["batchTimestampMs"]),
                watermark_ms=int(metadata["batchWatermarkMs"]),
                previous_watermark_ms=int(previous["batchWatermarkMs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(error) from error
        if closed_ms is None:
            return time
        # Nothing that the state has seen is taken back, though Spark's watermark were set back with its checkpoint.
        return replace(time, watermark_ms=max(time.watermark_ms, closed_ms), previous_watermark_ms=closed_ms)

    def due_until(self, mode: TimeMode) -> int | None:
        """Return the time up to which timers are due, that moment included; None where there are no timers."""
        return {
            TimeMode.NONE: None,
            TimeMode.PROCESSING: self.timestamp_ms,
            TimeMode.EVENT: self.watermark_ms,
        }[mode]


def _metadata(offsets: str) -> dict[str, Any]:
    try:
        metadata = json.loads(offsets.splitlines()[1])
    except (IndexError, ValueError) as error:
        raise _unreadable(error) from error
    if not isinstance(metadata, dict):
        raise _unreadable(TypeError("no metadata"))
    return metadata


def _unreadable(error: Exception) -> CorruptDataError:
    return CorruptDataError(
        f"Spark's offsets entry does not hold the batch's time ({type(error).__name__}: {error}); timers and TTL need "
        "it. Is the checkpointLocation written by another version of Spark?"
    )
