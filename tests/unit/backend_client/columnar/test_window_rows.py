"""
Rows that are condensed by pane before they go into overlapping windows.

A failure means that windows have other results than if each row had gone into each of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.columnar import (
    Aggregate,
    BatchMoment,
    Count,
    KeyBatch,
    KeyResults,
    Last,
    Max,
    Mean,
    Min,
    Sum,
    TopK,
    sliding,
)
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
@settings(max_examples=40, deadline=None)
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


class Squares(Sum):
    """The root of the sum of squares so far: two of them must not be added."""

    def update(self, rows: pa.RecordBatch, groups: Groups, old: Any, known: Any) -> list[pa.Array]:
        before = [pc.multiply(old[0], old[0])]
        squares = rows.set_column(1, "v", pc.multiply(rows.column("v"), rows.column("v")))
        sums = super().update(squares, groups, before, known)[0]
        return [pc.sqrt(sums).cast(pa.int64())]


class Loud(Aggregate):
    """Emits only great counts, and what ends."""

    def process(self, batch: KeyBatch) -> KeyResults:
        results = super().process(batch)
        assert results.output is not None
        return replace(results, output=results.output.filter(pc.greater(results.output.column("n"), 1)))

    def expired(
        self, keys: pa.RecordBatch, state: pa.RecordBatch, rows: pa.Schema, moment: BatchMoment
    ) -> pa.RecordBatch | None:
        return super().expired(keys, state, rows, replace(moment, output_mode="append"))


def test_subclasses_have_their_say() -> None:
    """A subclass's methods are called for each window's rows, and when its windows end."""
    windows = sliding("at", 10 * SECOND, 5 * SECOND)
    squares = Task(Aggregate(Squares("v", name="n"), windows=windows), ROWS)
    assert sorted(one["n"] for one in squares.run([new_row(1, 1, 3), new_row(1, 6, 4)])) == [3, 4, 5]

    loud = Task(Loud(Count(name="n"), windows=windows), ROWS)
    assert [one["n"] for one in loud.run([new_row(1, 1, 3), new_row(1, 6, 4)])] == [2]
    assert sorted(one["n"] for one in loud.run([], ms(15))) == [1, 1, 2]
    assert loud.next_ends_ms[0] == ms(5)


def test_rows_of_a_pane_that_do_not_fit_are_taken_one_by_one() -> None:
    """Late rows cannot stop a query by their sum, and other rows of a window may make its sum fit."""
    task, big = Task(Aggregate(Sum("v", name="s"), windows=sliding("at", 10 * SECOND, 5 * SECOND)), ROWS), 2**62
    assert task.run([new_row(1, 1, big), new_row(1, 2, big)], ms(15)) == []
    assert task.late_rows == [2]
    assert [one["s"] for one in task.run([new_row(1, 1, big), new_row(1, 2, big), new_row(1, 6, -big)], ms(5))] == [
        big,
        -big,
    ]
