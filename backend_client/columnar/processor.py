"""
The columnar API: a processor sees all keys of a part of a batch at once, as Arrow arrays with their state as columns.

Nothing here knows Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from backend_client.columnar.values import Bools, Ints
from backend_client.columnar.windows import Windows

OutputMode = Literal["update", "append"]


@dataclass(frozen=True, slots=True)
class BatchMoment:
    """
    What holds for a whole batch.

    Args:
        output_mode: What the query asked for.
        watermark_ms: Event time that is not waited for any more; None without a watermark. For rows it is that of the
            batch before, which is the same where that was closed at it (docs/time.md).
        timestamp_ms: Processing time of the batch; the same when it is executed again.
    """

    output_mode: OutputMode = "update"
    watermark_ms: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """
    Some keys with all their rows of a batch; each key (with windows: each key and window) comes once in a batch.

    Args:
        keys: One row per key: the grouping columns, and ``window_start`` and ``window_end`` where there are windows.
        rows: The rows of all keys, those of a key adjacent. Their order within a key is not defined.
        starts: Number of each key's first row.
        state: One row per key; null where the key has no state.
        has_state: Which keys have state.
        moment: What holds for the whole batch.
    """

    keys: pa.RecordBatch
    rows: pa.RecordBatch
    starts: Ints
    state: pa.RecordBatch
    has_state: Bools
    moment: BatchMoment

    @property
    def key_of_row(self) -> Ints:
        """The number of each row's key."""
        counts = np.diff(self.starts, append=self.rows.num_rows)
        return np.repeat(np.arange(len(self.starts)), counts)


@dataclass(frozen=True, slots=True)
class KeyResults:
    """
    What a processor makes of a `KeyBatch`.

    Args:
        state: The new state, one row per key.
        output: Rows of the operator's output; None for none.
        keep: Which keys have state from now on; None for all. That of the others is removed.
        expires_ms: The event time at which each key's state ends; needed if the processor says `expires`.
        late_rows: How many rows were dropped because the watermark had passed them. Rows of windows are counted anyway.
    """

    state: pa.RecordBatch
    output: pa.RecordBatch | None = None
    keep: Bools | None = None
    expires_ms: Ints | None = None
    late_rows: int = 0


class ColumnarProcessor(ABC):
    """
    What a user implements, or takes ready-made from `backend_client.columnar`.

    It is shipped to tasks, which share nothing, so it keeps nothing between calls but its arguments.
    """

    windows: Windows | None = None
    """With windows, state is kept for each key and window, and ends with the window."""

    expires: bool = False
    """Whether `process` says when state ends (`KeyResults.expires_ms`). State of windows always ends with them."""

    watermark_column: str | None = None
    """The column of the input whose times `process` compares with the watermark, if it does. Windows have theirs."""

    def check(self, rows: pa.Schema, output_mode: OutputMode) -> None:
        """
        Look at the columns of the input and the output mode, on the driver, before the query starts.

        Raises:
            InvalidInputError: The processor cannot work with them.
        """
        if self.windows is not None:
            self.windows.check(rows)

    @abstractmethod
    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        """
        Return the columns of the state of one key.

        Args:
            rows: The columns of the input.
        """

    def output_schema(self, keys: pa.Schema, rows: pa.Schema) -> pa.Schema | None:
        """Return the columns of the output; None if whoever uses the processor has to say it."""
        return None

    @abstractmethod
    def process(self, batch: KeyBatch) -> KeyResults:
        """Return new state and output of the keys."""

    def expired(
        self, keys: pa.RecordBatch, state: pa.RecordBatch, rows: pa.Schema, moment: BatchMoment
    ) -> pa.RecordBatch | None:
        """
        Return output for keys whose state ends with a watermark: that of the batch, or the one that its rows led to.

        Args:
            keys: As in `KeyBatch`.
            state: One row per key.
            rows: The columns of the input.
            moment: Of the batch.
        """
        return None
