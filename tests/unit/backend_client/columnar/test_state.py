"""Entries of columnar state with an end, and how many are read at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema

from backend_client.columnar.keys import KeyColumns
from backend_client.columnar.processor import KeyResults
from backend_client.columnar.state import ColumnarState
from backend_client.columnar.values import StateColumns
from tests.unit.backend_client.columnar.columnar_task import KEY_GROUPS, Table, Writer

ENDS_MS = 1000
KEY_BYTES, KEYS = 1 << 20, 20


def test_long_keys_that_end_are_taken_in_parts() -> None:
    """However long its keys are, expired state is read in chunks of a few megabytes, never as a whole."""
    table, writer = Table(), Writer()
    codec = StateColumns(pa.schema([("n", pa.int64())]))
    state = ColumnarState(codec, KEY_GROUPS, 1, 2, table.get_many, table.between)
    fields = pa.schema([("k", pa.string())])
    texts = pa.array([f"{number:03}" + "k" * KEY_BYTES for number in range(KEYS)])
    keys = KeyColumns(from_arrow_schema(fields).json(), fields).encode([texts])
    entries = state.entries(np.full(KEYS, KEY_GROUPS.first), keys)
    values = pa.RecordBatch.from_pydict({"n": range(KEYS)}, codec.schema)
    found = state.read(entries, None)
    changes = state.changes(entries, found, KeyResults(values), np.full(KEYS, ENDS_MS))
    writer.append_columns(changes, preemptive=False)
    writer.apply(table)

    ended = list(state.ended(ENDS_MS))

    assert all(sum(map(len, part)) <= 17 * KEY_BYTES for part, _, _ in ended)
    assert [key for part, _, _ in ended for key in part] == keys.to_pylist()
    assert [n for _, columns, _ in ended for n in columns.column("n").to_pylist()] == list(range(KEYS))
    assert sum(pc.is_null(changes.values).true_count for _, _, changes in ended) == 2 * KEYS
