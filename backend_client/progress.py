"""What one batch did and cost. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """
    Figures of one batch, over all its operators.

    `checkpoint_ms` is what the checkpoint adds to a batch: from the end of the last task to the existing manifest,
    without the time that the user's function takes meanwhile. `state_ms` is the time of the operators' jobs,
    `function_ms` that of the user's function. `tries` is 1 unless the batch had to be executed again. `late_rows` came
    behind the watermark and were dropped; they are not among `rows`. `watermark_ms` is the batch's watermark, None
    without operators that have a time mode.
    """

    job: str
    batch_id: int
    rows: int
    keys: int
    changes: int
    state_ms: float
    function_ms: float
    checkpoint_ms: float
    bytes_written: int
    objects_written: int
    tries: int
    late_rows: int = 0
    watermark_ms: int | None = None
