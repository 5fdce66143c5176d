"""How a processor of the columnar API is called, and what the driver finds out about it before the query starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from backend_client.batch_time import BatchTime
from backend_client.columnar.chunks import Chunk, KeyChunks
from backend_client.columnar.keys import KeyColumns
from backend_client.columnar.packing import pack_integers
from backend_client.columnar.processor import BatchMoment, ColumnarProcessor, KeyBatch, KeyResults, OutputMode
from backend_client.columnar.state import INDEX, STATE, ColumnarState
from backend_client.columnar.values import Bools, Ints, StateColumns
from backend_client.service.log_writer import LogWriter
from backend_client.spark.private.frames import arrow_schema, spark_schema
from backend_client.spark.task.late_rows import DELAY_KEY
from backend_client.table.journal import BYTES_MAX, memory_bytes
from backend_client.table.state_table import StateTable
from dstl_service.wire import StateInfo
from storage.change_set import ChangeColumns
from storage.errors import InvalidInputError
from storage.model import KeyGroupRange

logger = logging.getLogger("backend_client")

_UNIT = "dstl.unit"
"""Names the unit of a stored time in its field's metadata: to Spark's types, all units are one."""


@dataclass(frozen=True, slots=True)
class ColumnarPlan:
    """
    A columnar operator as its tasks need it.

    Args:
        processor: The user's.
        output_mode: Of the query.
        keys: The grouping columns.
        rows: The input's columns.
    """

    processor: ColumnarProcessor
    output_mode: OutputMode
    keys: pa.Schema
    rows: pa.Schema

    @classmethod
    def of(
        cls,
        processor: ColumnarProcessor,
        output_mode: str,
        input_schema: StructType,
        key_columns: Sequence[str],
        *,
        is_first: bool = True,
    ) -> ColumnarPlan:
        """
        Join a processor with its input.

        Raises:
            InvalidInputError: They do not fit.
        """
        if not isinstance(processor, ColumnarProcessor):
            raise InvalidInputError(f"a ColumnarProcessor is needed, not {type(processor).__name__}")
        mode: OutputMode = "append" if output_mode.lower() == "append" else "update"
        rows = arrow_schema(input_schema)
        keys = arrow_schema(StructType([input_schema[name] for name in key_columns]))
        processor.check(rows, mode)
        marked = [field.name for field in input_schema.fields if DELAY_KEY in (field.metadata or {})]
        _check_watermark(processor, mode, marked, is_first=is_first)
        return cls(processor, mode, keys, rows)

    def moments(self, time: BatchTime | None) -> tuple[BatchMoment, BatchMoment]:
        """
        Return what the processor is told with rows, and with state that ends behind them; a watermark of 0 is none.

        For rows the watermark of the batch before counts, as on Spark: it is another one where that was left open.
        """
        if time is None:
            return BatchMoment(self.output_mode), BatchMoment(self.output_mode)
        of_ends = BatchMoment(self.output_mode, time.watermark_ms or None, time.timestamp_ms)
        return replace(of_ends, watermark_ms=time.previous_watermark_ms or None), of_ends

    @property
    def all_keys(self) -> pa.Schema:
        """The columns of the keys that the processor sees."""
        windows = self.processor.windows
        return pa.schema([*self.keys, *(windows.fields(self.rows) if windows is not None else ())])

    def states(self) -> dict[str, StateInfo]:
        """
        Return the operator's state variables.

        Raises:
            InvalidInputError: A field of the state is of an impossible type.
        """
        schema = self.processor.state_schema(self.rows)
        StateColumns(schema)
        columns = spark_schema(schema)
        for column, field in zip(columns, schema, strict=True):
            if pa.types.is_timestamp(field.type) or pa.types.is_duration(field.type):
                column.metadata = {**column.metadata, _UNIT: field.type.unit}
        states = {STATE: StateInfo(1, STATE, columns.json())}
        if self.processor.windows is not None or self.processor.expires:
            states[INDEX] = StateInfo(2, INDEX, StructType().json())
        return states

    def check_stored(self, operator: str, stored: Mapping[str, StateInfo]) -> None:
        """
        Compare the state's columns with those of stored state, whose bytes can be read with these only.

        Of a time that was stored before its unit was written down, any unit may be right, and is taken for it.

        Raises:
            InvalidInputError: They differ; names the first that does.
        """
        if STATE not in stored:
            return
        old_fields, new_fields = _fields(stored[STATE].schema), _fields(self.states()[STATE].schema)
        for known, field in zip(old_fields, new_fields, strict=False):
            if known.dataType == field.dataType:
                known.metadata = {**field.metadata, **known.metadata}
        old, new = ([(field.name, _kind(field)) for field in fields] for fields in (old_fields, new_fields))
        if old != new or (INDEX in stored) != (INDEX in self.states()):
            ends = [("state that ends", "") if INDEX in states else None for states in (stored, self.states())]
            pairs = [*zip_longest(old, new), (ends[0], ends[1])]
            was, now = (
                "no such column" if part is None else " ".join(part).strip()
                for part in next(pair for pair in pairs if pair[0] != pair[1])
            )
            raise InvalidInputError(
                f"the columnar state of operator {operator!r} was stored with {was} where its processor has {now}; "
                "columnar state never changes its columns: go back to them, or begin anew with another job name and "
                "checkpointLocation"
            )

    def output_schema(self) -> StructType:
        """
        Return the columns of the output.

        Raises:
            InvalidInputError: The processor does not say it.
        """
        schema = self.processor.output_schema(self.all_keys, self.rows)
        if schema is None:
            raise InvalidInputError(f"{type(self.processor).__name__} has no output_schema; give outputStructType")
        return spark_schema(schema)


def _check_watermark(
    processor: ColumnarProcessor, output_mode: OutputMode, marked: Sequence[str], *, is_first: bool
) -> None:
    """
    Check that state which ends by event time has a watermark, and that it is on the column that the processor goes by.

    Behind another operator, a column that nobody marked may have times that the stream's watermark suits, so that is no
    error; the log says it.

    Raises:
        InvalidInputError: The watermark is on another column, or windows in append mode would never be put out.
    """
    windows, name = processor.windows, type(processor).__name__
    column = processor.watermark_column if windows is None else windows.column
    if column is None and not processor.expires:
        return
    if marked:
        if column is not None and column not in marked:
            how = (
                f"call withWatermark on {column!r} before groupBy"
                if is_first
                else f"name {column!r} as eventTimeColumnName of the operator before it"
            )
            raise InvalidInputError(
                f"processor {name} goes by the times in {column!r}, but the watermark is on "
                f"{' and '.join(map(repr, marked))}: give the processor that column, or {how}"
            )
        return
    if not is_first:
        logger.warning(
            "processor %s ends state by event time, but no column of its input has a watermark: unless the stream has "
            "one, state grows for ever. Name the eventTimeColumnName of the operator before it",
            name,
        )
    elif windows is not None and output_mode == "append":
        raise InvalidInputError(
            f"processor {name} puts windows out in append mode when the watermark has passed their end, but the input "
            f"has no watermark: call withWatermark on {column!r} before groupBy, or use outputMode 'Update'"
        )
    else:
        logger.warning(
            "processor %s ends state by event time, but its input has no watermark: state grows for ever. Call "
            "withWatermark before groupBy",
            name,
        )


def _fields(schema: str) -> list[StructField]:
    return StructType.fromJson(json.loads(schema)).fields


def _kind(field: StructField) -> str:
    """Return a field's type, with the unit of a time."""
    unit = field.metadata.get(_UNIT)
    return field.dataType.simpleString() + ("" if unit is None else f" in {unit}")


class _Written:
    """What was written in a batch whose end goes on from it; of much, most lies over the table already."""

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._parts: list[ChangeColumns] = []
        self._size_bytes = 0

    def add(self, part: ChangeColumns) -> None:
        """Take what no read of the rows' keys needs any more, for each key comes once."""
        self._parts.append(part)
        self._size_bytes += memory_bytes(part)
        if self._size_bytes > BYTES_MAX:
            self.lay_over()

    def lay_over(self) -> None:
        """Let reads see all of it."""
        self._table.lay_over(self._parts)
        self._parts, self._size_bytes = [], 0


class ColumnarCalls:
    """
    Calls a processor for the rows of one partition.

    Args:
        plan: The operator.
        key_schema: Of the grouping key, Spark's JSON.
        states: Its variables.
        key_groups: Those of the partition.
        moments: Of the batch: for its rows, and for state that ends, which does so behind them if that is later.
        preemptive_bytes: Change sets of about this size are sent while rows still flow.
    """

    def __init__(
        self,
        plan: ColumnarPlan,
        key_schema: str,
        states: dict[str, StateInfo],
        key_groups: KeyGroupRange,
        moments: tuple[BatchMoment, BatchMoment],
        preemptive_bytes: int,
    ) -> None:
        self._plan = plan
        self._processor = plan.processor
        self._keys = KeyColumns(key_schema, plan.keys)
        self._states = states
        self._key_groups = key_groups
        self._moment, self._moment_of_ends = moments
        self._written: _Written | None = None
        self._preemptive_bytes = preemptive_bytes
        self.rows_seen = 0
        self.keys_seen = 0
        self.late_rows = 0
        self.next_end_ms: int | None = None
        """When the first state ends that is left, or earlier."""

    def run(self, batches: Iterable[pa.RecordBatch], table: StateTable, writer: LogWriter) -> Iterator[pa.RecordBatch]:
        """Yield what the processor puts out: for state that ends, and for the rows."""
        index = self._states.get(INDEX)
        state = ColumnarState(
            StateColumns(self._processor.state_schema(self._plan.rows)),
            self._key_groups,
            self._states[STATE].id,
            index.id if index is not None else None,
            table.get_many,
            table.between,
        )
        if self._moment != self._moment_of_ends:
            self._written = _Written(table)
        yield from self._end(state, writer, self._moment)
        chunks = KeyChunks(batches, self._keys, self._plan.rows)
        for chunk in chunks:
            yield from self._process(chunk, state, writer)
        self.rows_seen, self.keys_seen = chunks.rows_seen, chunks.keys_seen
        if self._written is not None:
            self._written.lay_over()
            self._written = None
            yield from self._end(state, writer, self._moment_of_ends)
        self._note_end(state.next_end_ms(self._moment_of_ends.watermark_ms))

    def _end(self, state: ColumnarState, writer: LogWriter, moment: BatchMoment) -> Iterator[pa.RecordBatch]:
        """Remove the state that ends with a watermark: a set of its own."""
        windows, watermark_ms = self._processor.windows, moment.watermark_ms
        if watermark_ms is None:
            return
        for encoded, columns, changes in state.ended(watermark_ms):
            keys, starts = self._keys.decode(encoded, with_number=windows is not None)
            if windows is not None:
                keys = self._with_windows(keys.columns, np.array(starts, np.int64))
            output = self._processor.expired(keys, columns, self._plan.rows, moment)
            self._write(changes, writer, preemptive=True)
            if output is not None:
                yield output

    def _process(self, chunk: Chunk, state: ColumnarState, writer: LogWriter) -> Iterator[pa.RecordBatch]:
        windows = self._processor.windows
        if windows is None:
            keys = pa.RecordBatch.from_arrays(chunk.keys, schema=self._plan.keys)
            entries = state.entries(chunk.key_groups, chunk.encoded)
            rows, starts, ends_ms = chunk.rows, chunk.starts, None
        else:
            assigned = windows.assign(chunk.rows.column(windows.column), self._moment.watermark_ms)
            self.late_rows += assigned.late_rows
            if not len(assigned.rows):
                return
            of_row = np.searchsorted(chunk.starts, assigned.rows, side="right") - 1
            order = np.lexsort((assigned.rows, assigned.starts_us, of_row))
            of_row, begins = of_row[order], assigned.starts_us[order]
            starts = np.flatnonzero((np.diff(of_row, prepend=-1) != 0) | (np.diff(begins, prepend=begins[0]) != 0))
            rows = chunk.rows.take(pa.array(assigned.rows[order]))
            at, begins = of_row[starts], begins[starts]
            keys = self._with_windows([column.take(pa.array(at)) for column in chunk.keys], begins)
            entries = state.entries(chunk.key_groups[at], chunk.encoded.take(pa.array(at)), pack_integers(begins))
            ends_ms = windows.ends_ms(begins)
        found = state.read(entries, self._moment.watermark_ms)
        results = self._processor.process(KeyBatch(keys, rows, starts, found.columns, found.present, self._moment))
        self.late_rows += int(results.late_rows)
        keep, expires_ms = self._checked(results, len(entries))
        ends_ms = expires_ms if windows is None else ends_ms
        if ends_ms is not None and len(ends_ms):
            self._note_end(int(ends_ms.min()))
        changes = state.changes(entries, found, results.state, keep, ends_ms)
        self._write(changes, writer, preemptive=not chunk.is_last)
        if results.output is not None:
            yield results.output

    def _write(self, changes: ChangeColumns, writer: LogWriter, *, preemptive: bool) -> None:
        for piece in changes.pieces(self._preemptive_bytes):
            writer.append_columns(piece, preemptive=preemptive)
            if self._written is not None:
                self._written.add(piece)

    def _note_end(self, end_ms: int | None) -> None:
        if end_ms is not None and (self.next_end_ms is None or end_ms < self.next_end_ms):
            self.next_end_ms = end_ms

    def _checked(self, results: KeyResults, keys: int) -> tuple[Bools | None, Ints | None]:
        """
        Return which of these keys have state from now on, and when it ends, None if it does not end by itself.

        Raises:
            InvalidInputError: The processor returned something else than one value per key, or not when state ends.
        """
        name = type(self._processor).__name__
        if not isinstance(results.state, pa.RecordBatch) or results.state.num_rows != keys:
            what = f"{results.state.num_rows} rows" if isinstance(results.state, pa.RecordBatch) else "no RecordBatch"
            raise InvalidInputError(
                f"processor {name} returned {what} as state of {keys} keys; give KeyResults a state that is a "
                "pyarrow.RecordBatch with one row per key, in the order of batch.keys"
            )
        keep = None if results.keep is None else _per_key(f"processor {name}", "keep", results.keep, np.bool_, keys)
        if self._processor.windows is not None or not self._processor.expires:
            return keep, None
        if results.expires_ms is None:
            raise InvalidInputError(
                f"processor {name} has expires = True, but returned no expires_ms; give KeyResults an expires_ms: for "
                "each key the event time in ms, as int64, at which its state ends"
            )
        return keep, _per_key(f"processor {name}", "expires_ms", results.expires_ms, np.int64, keys)

    def _with_windows(self, keys: Sequence[pa.Array], starts_us: Ints) -> pa.RecordBatch:
        windows = self._processor.windows
        assert windows is not None
        kind = self._plan.rows.field(windows.column).type
        return pa.RecordBatch.from_arrays([*keys, *windows.columns(starts_us, kind)], schema=self._plan.all_keys)


def _per_key(whose: str, name: str, values: Any, kind: type[np.generic], keys: int) -> Any:
    """Return a part of the results as an array; `InvalidInputError` unless it has one value of the type per key."""
    array = np.asarray(values)
    if array.dtype != kind or array.shape != (keys,):
        raise InvalidInputError(
            f"{whose} returned {name} of type {array.dtype} and shape {array.shape}; give KeyResults a NumPy array of "
            f"type {np.dtype(kind)} with one value for each of the {keys} keys"
        )
    return array


def fitted(output: pa.RecordBatch, names: Sequence[str], types: Sequence[Any]) -> list[pa.Array]:
    """
    Return the columns of a processor's output with the types that Spark expects.

    Raises:
        InvalidInputError: A column is missing or of another type.
    """
    if set(output.schema.names) != set(names):
        raise InvalidInputError(
            f"the processor's output has the columns {', '.join(output.schema.names)}, its schema {', '.join(names)}"
        )
    columns = []
    for name, kind in zip(names, types, strict=True):
        try:
            columns.append(output.column(name).cast(kind))
        except (pa.ArrowException, ValueError) as error:
            raise InvalidInputError(f"output column {name!r} is of type {kind}: {error}") from error
    return columns
