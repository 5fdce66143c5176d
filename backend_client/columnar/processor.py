"""
The columnar API: a processor gets many keys of a batch at once, as Arrow arrays with their state as columns.

It does not depend on Spark.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from backend_client.columnar.reductions import Groups
from backend_client.columnar.values import Bools, Ints
from backend_client.columnar.windows import Windows

OutputMode = Literal["update", "append"]

MEANING = b"dstl.meaning"
"""Metadata key for what a column of the state is, such as a sum; a start whose column is something else is refused."""


@dataclass(frozen=True, slots=True)
class BatchMoment:
    """
    The properties of a whole batch.

    Args:
        output_mode: The operator's output mode.
        watermark_ms: Rows up to this event time count as late; None without a watermark. For rows it is the watermark
            of the batch before, or the batch's own if the batch before was closed at it (docs/time.md).
        timestamp_ms: Processing time of the batch; the same when it is executed again.
    """

    output_mode: OutputMode = "update"
    watermark_ms: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """
    Some keys with all their rows of a batch; each key (with windows: each key and window) occurs once per batch.

    Args:
        keys: One row per key: the grouping columns, and ``window_start`` and ``window_end`` with windows.
        rows: The rows of all keys, those of a key adjacent. Their order within a key is not defined.
        starts: Index of each key's first row.
        state: One row per key; null where the key has no state.
        has_state: Which keys have state.
        moment: The properties of the whole batch.
    """

    keys: pa.RecordBatch
    rows: pa.RecordBatch
    starts: Ints
    state: pa.RecordBatch
    has_state: Bools
    moment: BatchMoment

    @property
    def key_of_row(self) -> Ints:
        """The index of each row's key."""
        return Groups(self.starts, self.rows.num_rows).of_rows


@dataclass(frozen=True, slots=True)
class KeyResults:
    """
    A processor's results for a `KeyBatch`.

    Args:
        state: The new state, one row per key.
        output: Rows of the operator's output; None for none.
        keep: Which keys keep state; None for all. The state of the others is removed.
        expires_ms: The event time in ms at which each key's state ends; required if the processor sets `expires`.
        late_rows: Number of rows dropped as late. Late rows of windows are counted by the backend.
        changed: Which keys' state differs from before; None for all. The state of the others is not written again.
    """

    state: pa.RecordBatch
    output: pa.RecordBatch | None = None
    keep: Bools | None = None
    expires_ms: Ints | None = None
    late_rows: int = 0
    changed: Bools | None = None


class ColumnarProcessor(ABC):
    """
    The base class of columnar processors; `backend_client.columnar` has ready-made ones.

    A processor is shipped to tasks, which share nothing, so it must keep nothing between calls but its arguments.
    """

    windows: Windows | None = None
    """With windows, state is kept for each key and window, and ends with the window."""

    expires: bool = False
    """Whether `process` returns when state ends (`KeyResults.expires_ms`). A window's state always ends with it."""

    watermark_column: str | None = None
    """The input column whose times `process` compares with the watermark, if any. Windows define their own."""

    def check(self, rows: pa.Schema, output_mode: OutputMode) -> None:
        """
        Check the input's columns and the output mode, on the driver, before the query starts.

        Raises:
            InvalidInputError: The processor does not support them.
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
        """Return the columns of the output; None if the user must pass it as `outputStructType`."""
        return None

    @abstractmethod
    def process(self, batch: KeyBatch) -> KeyResults:
        """Return new state and output of the keys."""

    def expired(
        self, keys: pa.RecordBatch, state: pa.RecordBatch, rows: pa.Schema, moment: BatchMoment
    ) -> pa.RecordBatch | None:
        """
        Return output for keys whose state ends at a watermark: the batch's, or the one that its rows led to.

        Args:
            keys: As in `KeyBatch`.
            state: One row per key.
            rows: The columns of the input.
            moment: The properties of the batch, with that watermark.
        """
        return None

    def emits_expired(self, output_mode: OutputMode) -> bool:
        """Return whether `expired` is of use; if not, ended state is removed without being read."""
        return type(self).expired is not ColumnarProcessor.expired

    def condense(self, rows: pa.RecordBatch, groups: Groups) -> pa.RecordBatch | None:
        """
        Return one row per group that stands for its rows in `process_condensed`; None if this is not possible.

        Windows that overlap call it with the rows of each key and pane, so that a row need not occur in each window.
        """
        return None

    def process_condensed(self, batch: KeyBatch, rows: pa.Schema) -> KeyResults:
        """
        Do the same as `process`, for condensed rows.

        Args:
            batch: Its rows are those that `condense` has returned.
            rows: The columns of the input.
        """
        raise NotImplementedError
