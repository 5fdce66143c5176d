"""How much output is converted and sent together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backend_client.portions import OUTPUT_BYTES, OUTPUT_ROWS, Portion, pieces


def measured(portion: Portion, row_bytes: int) -> int:
    """Measure a whole portion of rows of this size; return the next one's length."""
    column: Any = SimpleNamespace(nbytes=portion.count * row_bytes)
    portion.measure(portion.count, [column])
    return portion.count


def test_short_rows_are_converted_in_thousands() -> None:
    """The portions of short rows grow to the greatest length."""
    portion = Portion()

    lengths = [portion.count, *(measured(portion, 10) for _ in range(9))]

    assert lengths[:3] == [50, 100, 200]
    assert lengths[-1] == OUTPUT_ROWS


def test_long_rows_are_converted_in_few() -> None:
    """Rows of megabytes are converted a few at a time, one by one if each is as large as a batch may be."""
    portion = Portion()

    assert measured(portion, OUTPUT_BYTES // 8) == 8
    assert measured(portion, 2 * OUTPUT_BYTES) == 1
    assert [measured(portion, 10) for _ in range(3)] == [2, 4, 8]


@pytest.mark.parametrize("rows", [0, 1, 25_000])
def test_pieces_hold_all_rows_in_order(rows: int) -> None:
    """A batch has a bounded number of rows, wherever Arrow has cut a column."""
    cut = rows // 3
    column = pa.array(range(rows), pa.int64())
    chunked = pa.chunked_array([column.slice(0, cut), column.slice(cut)])

    parts = list(pieces([column, chunked]))

    assert [number for first, _ in parts for number in first.to_pylist()] == list(range(rows))
    assert [number for _, second in parts for number in second.to_pylist()] == list(range(rows))
    assert all(isinstance(part, pa.Array) and len(part) <= OUTPUT_ROWS for pair in parts for part in pair)


def test_pieces_of_long_rows_are_few_rows() -> None:
    """A batch for Spark has a bounded number of bytes."""
    text = pa.array(["x" * (OUTPUT_BYTES // 4)] * 9)

    assert [len(part) for (part,) in pieces([text])] == [3, 3, 3]
