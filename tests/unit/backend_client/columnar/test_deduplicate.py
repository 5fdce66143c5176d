"""Duplicates of a key within a period."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from time import process_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.columnar import Deduplicate, KeyBatch, KeyResults
from backend_client.columnar.deduplicate import _order
from storage.errors import InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import Task
from tests.unit.backend_client.columnar.test_windows import BEGIN, ROWS, SECOND, ms, row


def seconds(output: list[Any]) -> list[tuple[Any, float]]:
    return sorted(((out["k"], (out["at"] - BEGIN) / SECOND) for out in output), key=repr)


def test_repetitions_are_dropped() -> None:
    """One row passes, then none within the period, also across batches; late rows and rows without time are dropped."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)

    assert seconds(task.run([row(1, 5), row(1, 3), row(1, 13), row(2, 3), row(None, 3)])) == [
        (1, 13),
        (1, 3),
        (2, 3),
        (None, 3),
    ]
    assert seconds(task.run([row(1, 22), row(1, 4), row(2, 13), row(1, None)], ms(0))) == [(2, 13)]
    assert seconds(task.run([row(1, 23), row(1, 22), row(3, 22)], ms(22))) == [(1, 23)]
    assert seconds(task.run([row(1, 32), row(2, 23)], ms(22.5))) == [(2, 23)]
    assert task.late_rows == [0, 0, 2, 0]


class Emitting(Deduplicate):
    """Would emit rows when state ends."""

    def expired(self, keys: Any, state: Any, rows: Any, moment: Any) -> Any:
        return None


def test_key_without_state_ends_nothing() -> None:
    """A key whose rows are all late or without time has no state, so nothing is due for it at the batch's end."""
    task = Task(Emitting("at", within=10 * SECOND), ROWS)

    assert task.run([row(1, 5), row(2, None)], ms(22)) == []
    assert task.run([row(1, 23), row(2, 5)], ms(22)) != []
    assert task.next_ends_ms == [None, ms(33)]


def test_nothing_is_left_of_ended_state() -> None:
    """Each batch removes what has ended since the one before, so all is gone although no batch looks at all of it."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)
    removed_ms = None
    for second in (0, 7, 14, 14, 21, 60):
        watermark_ms = ms(second)
        task.run([row(key, second + key) for key in range(5)], watermark_ms, removed_ms=removed_ms)
        removed_ms = watermark_ms
    task.run([], ms(80), removed_ms=removed_ms)
    assert task.table.entries == {}


class EndingAtOnce(Deduplicate):
    """Its state has ended when it is written."""

    def process(self, batch: KeyBatch) -> KeyResults:
        results = super().process(batch)
        assert batch.moment.watermark_ms is not None
        return replace(results, expires_ms=np.full(len(batch.starts), batch.moment.watermark_ms))


def test_ended_state_is_not_written() -> None:
    """State that has ended and emits nothing is not written, since the next batch would not look for it."""
    task = Task(EndingAtOnce("at", within=10 * SECOND), ROWS)

    assert task.run([row(1, 5)], ms(0)) != []
    assert task.table.entries == {}


def test_order_does_not_depend_on_the_times() -> None:
    """Rows are sorted by key and time also where both do not fit into one number."""
    times = np.array([3, -(2**62), 2**62, 1, 3, 2])
    keys = np.array([0, 0, 0, 1, 1, 1])
    assert _order(keys, times).tolist() == np.lexsort((times, keys)).tolist() == [1, 0, 2, 3, 5, 4]
    assert _order(keys[3:], times[3:]).tolist() == [0, 2, 1]


def test_end_that_emits_nothing_is_not_due() -> None:
    """State whose end emits nothing asks for no second pass: it is absent from then on, and removed later."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)

    task.run([row(1, 5)])
    assert task.run([row(1, 16)], ms(5), ends_ms=ms(15)) != []
    assert task.run([row(1, 30)], ms(26)) != []
    assert task.next_ends_ms == [None, None, None]
    assert len(task.table.entries) == 2


def test_repetition_does_not_write_state() -> None:
    """A key that passes no row keeps its state as it is, and the log gets nothing of it."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)
    task.run([row(1, 5), row(2, 5)])
    task.run([row(1, 6), row(2, 16)])
    assert task.changes == [4, 3]  # state and its end of both keys; of key 2 also the former end


def test_state_ends_with_the_watermark() -> None:
    """State is removed when the watermark passes its end, even without a row of its key."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)
    task.run([row(key, 1) for key in range(20)])
    assert len(task.table.entries) == 40
    task.run([row(1, 12)], ms(10.999))
    assert len(task.table.entries) == 40
    task.run([], ms(11))
    assert len(task.table.entries) == 2


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.none() | st.integers(0, 1), st.integers(0, 60)), max_size=8), st.integers(0, 15)
        ),
        max_size=4,
    )
)
def test_passed_rows_equal_model(given_batches: list[Any]) -> None:
    """I14: the rows that pass are those of a pass in time order, whatever state has ended meanwhile."""
    task = Task(Deduplicate("at", within=10 * SECOND), ROWS)
    last: dict[Any, int] = {}
    watermark = 0
    for rows, advance in given_batches:
        watermark += advance
        last = {key: second for key, second in last.items() if second + 10 > watermark}
        passed = []
        for key, second in sorted(rows, key=lambda each: each[1]):
            if second > watermark and (key not in last or second >= last[key] + 10):
                last[key] = second
                passed.append((key, float(second)))
        got = seconds(task.run([row(key, second) for key, second in rows], ms(watermark)))

        assert got == sorted(passed, key=repr)
        assert len(task.table.entries) == 2 * len(last)


def test_many_rows_of_a_key_take_time_by_their_number() -> None:
    """A key may have all rows of a batch, and pass all of them: the work is not the square of their number."""
    task = Task(Deduplicate("at", within=SECOND), ROWS)
    many = [row(1, 2 * at) for at in range(100_000)]
    begin = process_time()
    assert len(task.run(many, batch_rows=len(many))) == len(many)
    assert process_time() - begin < 20  # a round for each passed row took 40 s and more


def test_impossible_arguments_are_refused() -> None:
    """A column without times, or a period of zero, is refused when the query is created."""
    for column, within in (("v", SECOND), ("at", timedelta(0))):
        with pytest.raises(InvalidInputError):
            Task(Deduplicate(column, within), ROWS)
