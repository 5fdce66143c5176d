"""The ready-made aggregation processor, with or without windows. No I/O."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from backend_client.columnar.aggregations import Aggregation, Combinable, combines
from backend_client.columnar.processor import MEANING, BatchMoment, ColumnarProcessor, KeyBatch, KeyResults, OutputMode
from backend_client.columnar.reductions import Groups
from backend_client.columnar.windows import Windows
from storage.errors import InvalidInputError


class Aggregate(ColumnarProcessor):
    """
    Aggregates the rows of each key, over all batches or by event-time windows.

    Output: the grouping columns, ``window_start`` and ``window_end`` with windows, and a column per aggregation. In
    update mode it has the keys of the batch. Append mode needs windows; it emits each window once, in the batch whose
    rows moved the watermark past its end. A window's state ends with it.

    Args:
        aggregations: At least one.
        windows: Built by `tumbling` or `sliding`; None aggregates over all rows.
    """

    def __init__(self, *aggregations: Aggregation, windows: Windows | None = None) -> None:
        for given in aggregations:
            if not isinstance(given, Aggregation):
                raise InvalidInputError(
                    "Aggregate takes aggregations of backend_client.columnar, as in Aggregate(Count(), Sum('price')), "
                    f"not {given!r}"
                )
        self.windows = windows
        self._aggregations = aggregations

    @property
    def aggregations(self) -> tuple[Aggregation, ...]:
        """The aggregations."""
        return self._aggregations

    def check(self, rows: pa.Schema, output_mode: OutputMode) -> None:
        """Refuse missing or duplicate names, and append mode without windows."""
        super().check(rows, output_mode)
        names = [aggregation.output_name for aggregation in self._aggregations]
        if not names or len(set(names)) < len(names):
            raise InvalidInputError(
                f"Aggregate needs at least one aggregation, and distinct names; they are {names}. Use alias(name)"
            )
        if output_mode == "append" and self.windows is None:
            raise InvalidInputError(
                "aggregations without windows have no final result for outputMode 'Append'; use 'Update', or windows"
            )

    def state_schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns of all aggregations."""
        return pa.schema(
            [
                pa.field(f"{aggregation.output_name}.{number}", kind, metadata={MEANING: aggregation.meaning})
                for aggregation in self._aggregations
                for number, kind in enumerate(aggregation.state_types(rows))
            ]
        )

    def output_schema(self, keys: pa.Schema, rows: pa.Schema) -> pa.Schema:
        """Return keys and results."""
        results = [pa.field(each.output_name, each.result_type(rows)) for each in self._aggregations]
        return pa.schema([*keys, *results])

    def process(self, batch: KeyBatch) -> KeyResults:
        """Update all aggregations."""
        groups, schema = Groups(batch.starts, batch.rows.num_rows), batch.rows.schema
        columns: list[pa.Array] = []
        for aggregation, old in zip(self._aggregations, self._parts(schema, batch.state), strict=True):
            columns += aggregation.update(batch.rows, groups, old, batch.has_state)
        return self._results(batch, columns, schema)

    def condense(self, rows: pa.RecordBatch, groups: Groups) -> pa.RecordBatch | None:
        """Return the state of each group; None if its rows are needed one by one."""
        if type(self).process is not Aggregate.process or not all(map(combines, self._aggregations)):
            return None
        try:
            return self._condensed(rows, groups)
        except InvalidInputError:  # late rows are among them, and other rows of a window may make its sum fit
            return None

    def _condensed(self, rows: pa.RecordBatch, groups: Groups) -> pa.RecordBatch:
        nothing, columns = np.zeros(len(groups.starts), np.bool_), list[pa.Array]()
        for aggregation in self._aggregations:
            old = [pa.nulls(len(nothing), kind) for kind in aggregation.state_types(rows.schema)]
            columns += aggregation.update(rows, groups, old, nothing)
        return pa.RecordBatch.from_arrays(columns, schema=self.state_schema(rows.schema))

    def process_condensed(self, batch: KeyBatch, rows: pa.Schema) -> KeyResults:
        """Combine the states of the panes, and with them the stored ones."""
        groups, columns = Groups(batch.starts, batch.rows.num_rows), list[pa.Array]()
        olds, parts = self._parts(rows, batch.state), self._parts(rows, batch.rows)
        for aggregation, old, part in zip(self._aggregations, olds, parts, strict=True):
            assert isinstance(aggregation, Combinable)  # else nothing is condensed
            columns += aggregation.added(old, aggregation.combine(part, groups), batch.has_state)
        return self._results(batch, columns, rows)

    def expired(
        self, keys: pa.RecordBatch, state: pa.RecordBatch, rows: pa.Schema, moment: BatchMoment
    ) -> pa.RecordBatch | None:
        """Return the final results, in append mode."""
        return self._output(keys, state, rows) if moment.output_mode == "append" else None

    def emits_expired(self, output_mode: OutputMode) -> bool:
        """Return whether windows are emitted when they end: in append mode, or by a subclass."""
        return output_mode == "append" or type(self).expired is not Aggregate.expired

    def _results(self, batch: KeyBatch, columns: list[pa.Array], rows: pa.Schema) -> KeyResults:
        state = pa.RecordBatch.from_arrays(columns, schema=batch.state.schema)
        emitted = batch.moment.output_mode == "update"
        return KeyResults(state, self._output(batch.keys, state, rows) if emitted else None)

    def _parts(self, rows: pa.Schema, state: pa.RecordBatch) -> list[list[pa.Array]]:
        columns = iter(state.columns)
        return [[next(columns) for _ in aggregation.state_types(rows)] for aggregation in self._aggregations]

    def _output(self, keys: pa.RecordBatch, state: pa.RecordBatch, rows: pa.Schema) -> pa.RecordBatch:
        parts = self._parts(rows, state)
        results = [each.result(columns) for each, columns in zip(self._aggregations, parts, strict=True)]
        return pa.RecordBatch.from_arrays([*keys.columns, *results], schema=self.output_schema(keys.schema, rows))
