"""
The columnar join of two streams, compared with its definition.

A failure means that a pair is missing, doubled, or made of rows that do not meet.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_client.columnar.join.interval_join import IntervalJoin
from storage.errors import InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import Task

LEFT = pa.struct([("at", pa.timestamp("us", "UTC")), ("id", pa.int64()), ("text", pa.string())])
RIGHT = pa.struct([("at", pa.timestamp("us", "UTC")), ("id", pa.int64())])
ROWS = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("l", LEFT), ("r", RIGHT)])
SECOND = 1_000_000


def row(side: str, key: int | None, at_s: float | None, number: int) -> dict[str, Any]:
    """Return a row of the union."""
    at = None if at_s is None else np.datetime64(round(at_s * SECOND), "us").astype(object)
    left = {"at": at, "id": number, "text": "x" * (number % 3) if number % 4 else None} if side == "l" else None
    return {"k": key, "at": at, "l": left, "r": {"at": at, "id": number} if side == "r" else None}


def new_task(waits_s: tuple[float, float]) -> Task:
    """Return a task whose rows wait so long, left and right."""
    waits_us = dict(zip("lr", (round(wait * SECOND) for wait in waits_s), strict=True))
    return Task(IntervalJoin("at", waits_us), ROWS, "Append")


def defined(rows: list[tuple[str, int | None, float | None]], waits_s: tuple[float, float]) -> Counter[Any]:
    """Return the pairs of row numbers that meet."""
    numbered = list(enumerate(rows))
    return Counter(
        (key, left, right)
        for left, (side, key, at) in numbered
        for right, (other, same, moment) in numbered
        if (side, other) == ("l", "r") and key is not None and key == same and at is not None and moment is not None
        if moment <= at + waits_s[0] and at <= moment + waits_s[1]
    )


ONE = st.tuples(st.sampled_from("lr"), st.sampled_from([0, 1, 2, None]), st.sampled_from([None, *range(0, 40, 2), 7.5]))
WAITS = st.tuples(*[st.sampled_from([0, 0.5, 3, 8])] * 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(ONE, max_size=25), WAITS, st.integers(1, 9))
def test_pairs_are_those_of_the_definition(
    rows: list[tuple[str, int | None, float | None]], waits_s: tuple[float, float], batch_rows: int
) -> None:
    """However rows come in batches, each pair that meets is emitted once, as its rows were."""
    task, found = new_task(waits_s), Counter[Any]()
    for begin in range(0, len(rows), batch_rows):
        batch = [row(*one, begin + at) for at, one in enumerate(rows[begin : begin + batch_rows])]
        for pair in task.run(batch):
            left, right = pair["l"], pair["r"]
            found[pair["k"], left["id"], right["id"]] += 1
            assert left["text"] == ("x" * (left["id"] % 3) if left["id"] % 4 else None)
            assert pair["at"] == max(left["at"], right["at"])
    assert found == defined(rows, waits_s)


@settings(max_examples=40, deadline=None)
@given(st.lists(ONE, max_size=25), WAITS, st.integers(1, 9))
def test_rows_end_with_the_watermark(
    rows: list[tuple[str, int | None, float | None]], waits_s: tuple[float, float], batch_rows: int
) -> None:
    """Late rows are dropped and counted; rows whose wait is over are removed, and no partner misses them."""
    task, found, on_time, late, watermark_s = new_task(waits_s), Counter[Any](), [], 0, -1.0
    for begin in range(0, len(rows), batch_rows):
        batch = list(enumerate(rows[begin : begin + batch_rows], begin))
        late += sum(one[2] is not None and one[2] <= watermark_s for _, one in batch)
        on_time += [one if one[2] is None or one[2] > watermark_s else ("late", None, None) for _, one in batch]
        pairs = task.run([row(*one, number) for number, one in batch], round(watermark_s * 1000))
        found += Counter((pair["k"], pair["l"]["id"], pair["r"]["id"]) for pair in pairs)
        watermark_s = max([watermark_s, *(one[2] - 4 for _, one in batch if one[2] is not None)])
    assert found == defined(on_time, waits_s)
    assert sum(task.late_rows) == late
    task.run([], 1_000_000)
    assert not task.table.entries


def test_only_entries_that_get_rows_are_written() -> None:
    """A row that only visits a neighbour's bucket does not write it again."""
    task = new_task((10, 10))
    task.run([row("l", 1, 19, 1)])
    before = dict(task.table.entries)
    assert len(task.run([row("r", 1, 21, 2)])) == 1  # in the next bucket of 20 s
    assert {key: task.table.entries[key] for key in before} == before
    assert len(task.table.entries) == 2 * len(before)


def test_unfit_input_is_refused() -> None:
    """Columns that columnar state cannot hold, and other modes than append, are refused before the query starts."""
    nested = pa.schema([*list(ROWS)[:2], ("l", pa.struct([("tags", pa.list_(pa.string()))])), ("r", RIGHT)])
    with pytest.raises(InvalidInputError, match="cannot hold 'tags'"):
        Task(IntervalJoin("at", {"l": 1, "r": 1}), nested, "Append")
    with pytest.raises(InvalidInputError, match="output mode is Append"):
        Task(IntervalJoin("at", {"l": 1, "r": 1}), ROWS)


def test_other_columns_or_waits_have_other_state() -> None:
    """The names of the state's columns contain all that the stored bytes depend on, and a start compares them."""
    names = new_task((10, 5)).plan.processor.state_schema(ROWS).names
    assert names == [
        "l (at timestamp[us, tz=UTC], id int64, text string) waiting 10 s",
        "r (at timestamp[us, tz=UTC], id int64) waiting 10 s",
    ]


@pytest.mark.parametrize("waits_s", [(14 * 86_400, 14 * 86_400 + 1), (3600, 3600.001), (0.1, 0.3)])
def test_any_other_wait_is_refused(waits_s: tuple[float, float]) -> None:
    """A start with another longer wait, however little it differs, is refused: its buckets or their ends are others."""
    before, after = (new_task((wait_s, 0.05)).plan for wait_s in waits_s)
    with pytest.raises(InvalidInputError, match="cannot change its columns"):
        after.check_stored("join", before.states())
