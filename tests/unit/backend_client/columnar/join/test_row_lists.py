"""Lists of rows as bytes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.columnar.join.row_lists import ListedRows, pack_lists, unpack_lists
from storage.errors import CorruptDataError

LISTS = st.lists(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=5)), max_size=4), max_size=5)


@given(LISTS)
def test_rows_come_back(lists: list[list[tuple[int, bytes]]]) -> None:
    """Unpacked lists have the packed rows, in their order; a list without rows is null."""
    flat = [(number, *row) for number, rows in enumerate(lists) for row in rows]
    numbers, times, values = zip(*flat, strict=True) if flat else ((), (), ())
    rows = ListedRows(np.array(numbers, np.int64), np.array(times, np.int64), pa.array(values, pa.binary()))

    packed = pack_lists(rows, len(lists))

    assert [value is None for value in packed.to_pylist()] == [not rows for rows in lists]
    found = unpack_lists(packed)
    assert list(zip(found.lists.tolist(), found.times.tolist(), found.values.to_pylist(), strict=True)) == flat


@pytest.mark.parametrize("size", [4, 13])
def test_cut_list_is_an_error(size: int) -> None:
    """I10: a list that ends within a row is damage, not a shorter list."""
    rows = ListedRows(np.zeros(1, np.int64), np.zeros(1, np.int64), pa.array([b"abc"]))
    whole = pack_lists(rows, 1).to_pylist()[0]
    with pytest.raises(CorruptDataError, match="a stored list of rows ends within"):
        unpack_lists(pa.array([whole[:size]]))
