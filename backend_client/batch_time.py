"""
The time of a batch, which Spark records before it runs the batch; so it is the same when the batch runs again.

Spark's own tracker computes the watermark (delays, several inputs, policy, restarts) and writes it into the batch's
offsets entry, beside the batch's processing time. No I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

from storage.errors import CorruptDataError, InvalidInputError


class TimeMode(Enum):
    """The clock of an operator's timers, by Spark's names."""

    NONE = "None"
    PROCESSING = "ProcessingTime"
    EVENT = "EventTime"

    @classmethod
    def of(cls, text: str) -> Self:
        """
        Parse a mode, case-insensitively as in Spark.

        Raises:
            InvalidInputError: The mode does not exist.
        """
        for mode in cls:
            if str(text).lower() == mode.value.lower():
                return mode
        raise InvalidInputError(f"timeMode must be 'None', 'ProcessingTime' or 'EventTime', not {text!r}")


@dataclass(frozen=True, slots=True)
class BatchTime:
    """
    Times of one batch in ms since 1970.

    `watermark_ms` is the watermark that earlier batches led to, 0 without any; `previous_watermark_ms` is that of the
    batch before, or the one at which that batch was closed.
    """

    timestamp_ms: int
    watermark_ms: int
    previous_watermark_ms: int

    @classmethod
    def read(cls, offsets: str, previous_offsets: str | None, closed_ms: int | None = None) -> Self:
        """
        Parse Spark's offsets entries of a batch and of the one before it, closed at `closed_ms` or left open (None).

        Raises:
            CorruptDataError: An entry does not have Spark's format.
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
        # The watermark never falls below what the state has seen, even if Spark's was set back with its checkpoint.
        return replace(time, watermark_ms=max(time.watermark_ms, closed_ms), previous_watermark_ms=closed_ms)

    def due_until(self, mode: TimeMode) -> int | None:
        """Return the time in ms up to which timers are due, inclusive; None without timers."""
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
        raise _unreadable(TypeError("it has no metadata"))
    return metadata


def _unreadable(error: Exception) -> CorruptDataError:
    return CorruptDataError(
        f"Spark's offsets entry does not hold the batch's time ({type(error).__name__}: {error}); timers and TTL need "
        "it. Check whether another version of Spark wrote the checkpointLocation"
    )
