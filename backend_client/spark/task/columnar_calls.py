"""Calls a processor of the columnar API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from backend_client.columnar.chunks import Chunk, KeyChunks
from backend_client.columnar.keys import KeyColumns
from backend_client.columnar.packing import pack_integers
from backend_client.columnar.processor import BatchMoment, KeyBatch, KeyResults
from backend_client.columnar.state import INDEX, STATE, ColumnarState
from backend_client.columnar.values import Ints, StateColumns
from backend_client.columnar.window_rows import Panes, window_rows
from backend_client.columnar.windows import Windows
from backend_client.service.log_writer import LogWriter
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.combining import Combining
from backend_client.table.journal import BYTES_MAX, memory_bytes
from backend_client.table.state_table import StateTable
from dstl_service.wire import StateInfo
from storage.change_set import ChangeColumns
from storage.errors import InternalError, InvalidInputError
from storage.key_groups import KeyGroupRange


class _Written:
    """Changes of a batch that its second step reads again; above a size they are overlaid on the table early."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._parts: list[ChangeColumns] = []
        self._size_bytes = 0

    def add(self, part: ChangeColumns) -> None:
        """Add changes; no later read of the batch's rows needs them, because each key is visited once."""
        self._parts.append(part)
        self._size_bytes += memory_bytes(part)
        if self._size_bytes > BYTES_MAX:
            self.overlay()

    def overlay(self) -> None:
        """Make all changes visible to reads."""
        self._table.overlay(self._parts)
        self._parts, self._size_bytes = [], 0


class ColumnarCalls:
    """
    Calls a processor for the rows of one partition.

    Args:
        plan: The operator.
        key_schema: The grouping key's schema, as Spark's JSON.
        states: The operator's state variables.
        key_groups: The partition's key groups.
        moments: The batch's moments for its rows and for ending state; if they differ, state also ends after the rows.
        preemptive_bytes: Change sets of about this size are sent while rows are still being processed.
        combining: How Spark has combined the rows; None if they are as they came.
        removed_ms: The batch before has removed the state that ended up to this watermark and emits nothing; None if
            that is not known.
    """

    def __init__(
        self,
        plan: ColumnarPlan,
        key_schema: str,
        states: dict[str, StateInfo],
        key_groups: KeyGroupRange,
        moments: tuple[BatchMoment, BatchMoment],
        preemptive_bytes: int,
        combining: Combining | None = None,
        removed_ms: int | None = None,
    ) -> None:
        self._plan = plan
        self._processor = plan.processor
        self._keys = KeyColumns(key_schema, plan.keys)
        self._states = states
        self._key_groups = key_groups
        self._moment, self._moment_of_ends = moments
        self._written: _Written | None = None
        # State whose end emits nothing counts as absent from then on, and is removed by the next batch: no second pass
        # has to do it.
        self._emits_ended = plan.processor.emits_expired(plan.output_mode)
        self._preemptive_bytes = preemptive_bytes
        self._combining = combining
        self._removed_ms = removed_ms
        self.rows_seen = 0
        self.keys_seen = 0
        self.late_rows = 0
        self.groups = 0
        """Number of rows that are left if rows of a key, with windows of a key and pane, are combined."""
        self.next_end_ms: int | None = None
        """A lower bound, in ms, on when the first remaining state ends; None if its end emits nothing."""

    def run(self, batches: Iterable[pa.RecordBatch], table: StateTable, writer: LogWriter) -> Iterator[pa.RecordBatch]:
        """Yield the processor's output: for state that ends, and for the rows."""
        index = self._states.get(INDEX)
        state = ColumnarState(
            StateColumns(self._processor.state_schema(self._plan.rows)),
            self._key_groups,
            self._states[STATE].id,
            index.id if index is not None else None,
            table.get_many,
            table.between,
        )
        if self._emits_ended and self._moment != self._moment_of_ends:
            self._written = _Written(table)
        yield from self._end(state, writer, self._moment)
        chunks = KeyChunks(batches, self._keys, self._plan.rows if self._combining is None else self._combining.rows)
        for chunk in chunks:
            yield from self._process(chunk, state, writer)
        self.keys_seen = chunks.keys_seen
        if self._combining is None:
            self.rows_seen = chunks.rows_seen
        if self._written is not None:
            self._written.overlay()
            self._written = None
            yield from self._end(state, writer, self._moment_of_ends)
        if self._emits_ended:
            self._note_end(state.next_end_ms(self._moment_of_ends.watermark_ms))

    def _end(self, state: ColumnarState, writer: LogWriter, moment: BatchMoment) -> Iterator[pa.RecordBatch]:
        """Remove the state that ends at a watermark, in change sets of its own."""
        windows, watermark_ms = self._processor.windows, moment.watermark_ms
        if watermark_ms is None:
            return
        if not self._emits_ended:
            for changes in state.removal(watermark_ms, self._removed_ms):
                self._write(changes, writer, preemptive=True)
            return
        for encoded, columns, changes in state.ended(watermark_ms):
            keys, starts = self._keys.decode(encoded, with_number=windows is not None)
            if windows is not None:
                keys = self._with_windows(windows, keys.columns, np.array(starts, np.int64))
            output = self._processor.expired(keys, columns, self._plan.rows, moment)
            self._write(changes, writer, preemptive=True)
            if output is not None:
                yield output

    def _process(self, chunk: Chunk, state: ColumnarState, writer: LogWriter) -> Iterator[pa.RecordBatch]:
        windows, panes = self._processor.windows, self._panes(chunk)
        if windows is None:
            keys = pa.RecordBatch.from_arrays(chunk.keys, schema=self._plan.keys)
            entries = state.entries(chunk.key_groups, chunk.encoded)
            rows, starts, ends_ms, is_condensed = chunk.rows, chunk.starts, None, panes is not None
            if panes is not None:
                rows, starts = panes.rows, np.flatnonzero(np.diff(panes.key_of_row, prepend=-1))
            self.groups += len(starts)
        else:
            placed = window_rows(chunk, windows, self._moment.watermark_ms, self._processor.condense, panes)
            self.late_rows += placed.late_rows
            self.groups += placed.panes
            if not len(placed.starts):
                return
            rows, starts, begins, at = placed.rows, placed.starts, placed.begins_us, pa.array(placed.keys)
            keys = self._with_windows(windows, [column.take(at) for column in chunk.keys], begins)
            entries = state.entries(chunk.key_groups[placed.keys], chunk.encoded.take(at), pack_integers(begins))
            ends_ms, is_condensed = windows.ends_ms(begins), placed.is_condensed
        found = state.read(entries, self._moment.watermark_ms)
        batch = KeyBatch(keys, rows, starts, found.columns, found.present, self._moment)
        if is_condensed:
            results = self._processor.process_condensed(batch, self._plan.rows)
        else:
            results = self._processor.process(batch)
        if not isinstance(results, KeyResults):
            raise InvalidInputError(
                f"process of {type(self._processor).__name__} must return KeyResults, not {type(results).__name__}"
            )
        self.late_rows += int(results.late_rows)
        results = self._checked(results, len(entries))
        ends_ms = results.expires_ms if windows is None else ends_ms
        if ends_ms is not None and not self._emits_ended and self._moment.watermark_ms is not None:
            # It counts as absent from now on, and the next batch only looks for what ends later.
            ends_later = ends_ms > self._moment.watermark_ms
            results = replace(results, keep=ends_later if results.keep is None else ends_later & results.keep)
        if ends_ms is not None:
            left = ends_ms if results.keep is None else ends_ms[results.keep]
            self._note_end(int(left.min()) if len(left) else None)
        changes = state.changes(entries, found, results, ends_ms)
        self._write(changes, writer, preemptive=not chunk.is_last)
        if results.output is not None:
            yield results.output

    def _panes(self, chunk: Chunk) -> Panes | None:
        """
        Return the rows as Spark has combined them, and count those; None if it has not.

        Raises:
            InternalError: Spark has moved them elsewhere.
        """
        if self._combining is None:
            return None
        own = self._key_groups
        if chunk.key_groups.min() < own.first or chunk.key_groups.max() > own.last:
            raise InternalError(f"combined rows of key groups outside {own.first} to {own.last} are in their partition")
        panes = self._combining.panes(chunk)
        self.rows_seen += int(panes.counts.sum())
        return panes

    def _write(self, changes: ChangeColumns, writer: LogWriter, *, preemptive: bool) -> None:
        for piece in changes.pieces(self._preemptive_bytes):
            writer.append_columns(piece, preemptive=preemptive)
            if self._written is not None:
                self._written.add(piece)

    def _note_end(self, end_ms: int | None) -> None:
        if self._emits_ended and end_ms is not None and (self.next_end_ms is None or end_ms < self.next_end_ms):
            self.next_end_ms = end_ms

    def _checked(self, results: KeyResults, keys: int) -> KeyResults:
        """
        Return the results with arrays of the right types; without `expires_ms` if state does not expire by itself.

        Raises:
            InvalidInputError: The processor did not return one value per key, or no `expires_ms` although it expires.
        """
        name = type(self._processor).__name__
        if not isinstance(results.state, pa.RecordBatch) or results.state.num_rows != keys:
            what = f"{results.state.num_rows} rows" if isinstance(results.state, pa.RecordBatch) else "no RecordBatch"
            raise InvalidInputError(
                f"processor {name} returned {what} as state of {keys} keys; give KeyResults a state that is a "
                "pyarrow.RecordBatch with one row per key, in the order of batch.keys"
            )
        who, keep, changed = f"processor {name}", results.keep, results.changed
        keep = None if keep is None else _per_key(who, "keep", keep, np.bool_, keys)
        changed = None if changed is None else _per_key(who, "changed", changed, np.bool_, keys)
        results = replace(results, keep=keep, changed=changed)
        if self._processor.windows is not None or not self._processor.expires:
            return replace(results, expires_ms=None)
        if results.expires_ms is None:
            raise InvalidInputError(
                f"processor {name} has expires = True, but returned no expires_ms; give KeyResults an expires_ms: for "
                "each key the event time in ms, as int64, at which its state ends"
            )
        return replace(results, expires_ms=_per_key(who, "expires_ms", results.expires_ms, np.int64, keys))

    def _with_windows(self, windows: Windows, keys: Sequence[pa.Array], starts_us: Ints) -> pa.RecordBatch:
        kind = self._plan.rows.field(windows.column).type
        return pa.RecordBatch.from_arrays([*keys, *windows.columns(starts_us, kind)], schema=self._plan.all_keys)


def _per_key(whose: str, name: str, values: Any, kind: type[np.generic], keys: int) -> Any:
    """Return one field of the results as an array; `InvalidInputError` unless it has one value of `kind` per key."""
    array = np.asarray(values)
    if array.dtype != kind or array.shape != (keys,):
        raise InvalidInputError(
            f"{whose} returned {name} of type {array.dtype} and shape {array.shape}; give KeyResults a NumPy array of "
            f"type {np.dtype(kind)} with one value for each of the {keys} keys"
        )
    return array


def with_types(output: pa.RecordBatch, names: Sequence[str], types: Sequence[Any]) -> list[pa.Array]:
    """
    Return the columns of a processor's output, cast to the types that Spark expects.

    Raises:
        InvalidInputError: The column names differ from the schema's, or a column cannot be cast.
    """
    if not isinstance(output, pa.RecordBatch):
        raise InvalidInputError(
            f"the processor's output must be a pyarrow.RecordBatch, not {type(output).__name__}; a table has "
            "those of table.combine_chunks().to_batches()"
        )
    if set(output.schema.names) != set(names):
        raise InvalidInputError(
            f"the processor's output has the columns {', '.join(output.schema.names)}, but its output schema has "
            f"{', '.join(names)}; return exactly those"
        )
    columns = []
    for name, kind in zip(names, types, strict=True):
        try:
            columns.append(output.column(name).cast(kind))
        except (pa.ArrowException, ValueError) as error:
            raise InvalidInputError(f"values of output column {name!r} do not fit its type {kind}: {error}") from error
    return columns
