"""
Rows that are condensed by pane before they go into overlapping windows.

A failure means that windows have other results than if each row had gone into each of them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.columnar import Aggregate, Count, Last, Max, Mean, Min, Sum, TopK, sliding
from backend_client.columnar.reductions import Groups
from tests.unit.backend_client.columnar.columnar_task import Task
from tests.unit.backend_client.columnar.test_windows import ROWS, SECOND, ms, row

ALL = (Count(), Count("v"), Sum("v"), Min("v"), Max("v"), Mean("v"), Last("v", by="at"))


class OneByOne(Aggregate):
    """Takes rows as they are."""

    def condense(self, rows: pa.RecordBatch, groups: Groups) -> pa.RecordBatch | None:
        return None


def new_row(key: int, second: float | None, value: int | None) -> dict[str, Any]:
    return {**row(key, second), "v": value}


BATCHES = st.lists(
    st.lists(
        st.builds(
            new_row, st.integers(0, 2), st.sampled_from([None, *range(0, 40, 3), 10.5]), st.none() | st.integers(-9, 9)
        ),
        max_size=12,
    ),
    max_size=4,
)


@pytest.mark.parametrize("mode", ["Update", "Append"])
@settings(max_examples=100, deadline=None)
@given(BATCHES, st.sampled_from([(10, 5), (12, 3), (10, 4)]), st.sampled_from([0, 2]))
def test_condensed_rows_have_the_same_results(
    mode: str, batches: list[list[dict[str, Any]]], size: tuple[int, int], offset: int
) -> None:
    """I14: windows, late rows and stored state are the same as if each row had gone into each of its windows."""
    windows = sliding("at", size[0] * SECOND, size[1] * SECOND, offset * SECOND)
    tasks = [Task(kind(*ALL, windows=windows), ROWS, mode) for kind in (Aggregate, OneByOne)]
    for number, batch in enumerate(batches):
        found = [task.run(batch, ms(10 * number - 5), ends_ms=ms(10 * number)) for task in tasks]
        assert sorted(found[0], key=repr) == sorted(found[1], key=repr)
    assert tasks[0].late_rows == tasks[1].late_rows
    assert tasks[0].table.entries == tasks[1].table.entries


def test_rows_are_condensed_only_where_all_aggregations_can() -> None:
    """One aggregation whose states cannot be combined leaves the rows as they are."""
    rows = pa.RecordBatch.from_pylist([new_row(1, 1, 3), new_row(1, 2, 4)], ROWS)
    condensed = Aggregate(Count(), Sum("v")).condense(rows, Groups(pa.array([0]).to_numpy(), 2))
    assert condensed is not None
    assert condensed.to_pydict() == {"count(1).0": [2], "sum(v).0": [7]}
    assert Aggregate(Count(), TopK("v")).condense(rows, Groups(pa.array([0]).to_numpy(), 2)) is None
