"""A columnar operator without Spark: its real calls over a dictionary as the table, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from backend_client.columnar import BatchMoment, ColumnarProcessor
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.event_time import DELAY_KEY
from backend_client.spark.task.columnar_calls import ColumnarCalls
from storage.change_set import ChangeColumns, decode_change_set, encode_columns
from storage.key_groups import KeyGroupRange

KEY_GROUPS = KeyGroupRange(2, 5)


class Table:
    """The operations of `StateTable` that columnar operators use, in memory."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def get_many(self, keys: pa.Array, covered: float) -> pa.Array:
        assert 0 < covered <= 1
        return pa.array([self.entries.get(key) for key in keys.to_pylist()], pa.binary())

    def overlay(self, parts: Iterable[ChangeColumns]) -> None:
        for key, value in (pair for part in parts for pair in part.pairs()):
            self.entries.pop(key, None) if value is None else self.entries.__setitem__(key, value)

    def between(self, ranges: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for low, high in ranges:
            yield from sorted((key, value) for key, value in self.entries.items() if low <= key < high)


class Writer:
    """Keeps change sets as they are stored; the table gets them after the batch (I1)."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.changes = 0

    def append_columns(self, changes: ChangeColumns, *, preemptive: bool) -> None:
        ordered = changes.keys.to_pylist()
        assert ordered == sorted(set(ordered)), "a change set is sorted, and has each key once"
        self.payloads.append(encode_columns(changes))
        self.changes += len(ordered)

    def apply(self, table: Table) -> None:
        for payload in self.payloads:
            for key, value in decode_change_set(payload, "a test"):
                if value is None:
                    table.entries.pop(key, None)
                else:
                    table.entries[key] = value


class Task:
    """One partition of an operator, grouped by the column ``k``; a column ``at`` has the watermark."""

    def __init__(self, processor: ColumnarProcessor, rows: pa.Schema, output_mode: str = "Update") -> None:
        self.rows = rows
        self.plan = ColumnarPlan.of(processor, output_mode, with_watermark(rows, "at"), ["k"])
        self.table = Table()
        self.preemptive_bytes = 1 << 20
        self.late_rows: list[int] = []
        self.next_ends_ms: list[int | None] = []
        self.changes: list[int] = []

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        watermark_ms: int | None = None,
        batch_rows: int = 3,
        ends_ms: int | None = None,
        removed_ms: int | None = None,
    ) -> list[Any]:
        """Run one batch and return its output as dictionaries; state up to `ends_ms` ends after the rows."""
        ordered = sorted(rows, key=lambda row: (key_group(row["k"]), str(type(row["k"])), row["k"] or 0))
        batches = [self._batch(ordered[at : at + batch_rows]) for at in range(0, len(ordered), batch_rows)]
        moment = BatchMoment(self.plan.output_mode, watermark_ms, 0)
        calls = ColumnarCalls(
            self.plan,
            from_arrow_schema(self.plan.keys).json(),
            self.plan.states(),
            KEY_GROUPS,
            (moment, moment if ends_ms is None else BatchMoment(self.plan.output_mode, ends_ms, 0)),
            self.preemptive_bytes,
            removed_ms=removed_ms,
        )
        writer = Writer()
        # Replace table and log writer.
        outputs = list(calls.run(batches, self.table, writer))  # type: ignore[arg-type]
        assert calls.rows_seen == len(rows)
        self.late_rows.append(calls.late_rows)
        self.next_ends_ms.append(calls.next_end_ms)
        self.changes.append(writer.changes)
        writer.apply(self.table)
        return [row for output in outputs for row in output.to_pylist()]

    def _batch(self, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        columns = [pa.array([row[field.name] for row in rows], field.type) for field in self.rows]
        groups = pa.array([key_group(row["k"]) for row in rows], pa.int32())
        key = columns[self.rows.names.index("k")]
        names = ["__dstl_key_group", "__dstl_key_0", *self.rows.names]
        return pa.RecordBatch.from_arrays([groups, key, *columns], names)


def with_watermark(rows: pa.Schema, *columns: str) -> StructType:
    """Return columns as Spark has them after ``withWatermark`` on some of them."""
    schema = from_arrow_schema(rows)
    for field in schema:
        if field.name in columns:
            field.metadata = {DELAY_KEY: 5000}
    return schema


def key_group(key: int | None) -> int:
    """Spread keys over the partition's key groups."""
    return KEY_GROUPS.first + (key or 0) % (KEY_GROUPS.last - KEY_GROUPS.first + 1)
