"""Aggregations over event-time windows."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_client.columnar import Aggregate, Count, Sum, Windows, sliding, tumbling
from storage.errors import CorruptDataError, InvalidInputError
from tests.unit.backend_client.columnar.columnar_task import Task

ROWS = pa.schema([("k", pa.int32()), ("v", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
SECOND = timedelta(seconds=1)
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
BEGIN_S = int(BEGIN.timestamp())


def row(key: int | None, second: float | None, value: int = 1) -> dict[str, Any]:
    return {"k": key, "v": value, "at": None if second is None else BEGIN + second * SECOND}


def plain(output: list[Any]) -> list[tuple[Any, ...]]:
    """Return (key, begin, end, results…) with seconds since BEGIN."""
    return sorted(
        (
            out["k"],
            (out["window_start"] - BEGIN) / SECOND,
            (out["window_end"] - BEGIN) / SECOND,
            *list(out.values())[3:],
        )
        for out in output
    )


def ms(second: float) -> int:
    return int((BEGIN_S + second) * 1000)


def test_windows_end_with_the_watermark() -> None:
    """In append mode a window is emitted once, at its end; its late rows are dropped, and its state is removed."""
    task = Task(Aggregate(Count(), Sum("v"), windows=tumbling("at", 10 * SECOND)), ROWS, "Append")

    assert task.run([row(1, 1), row(1, 9.999, 5), row(1, 10), row(2, 3)], None) == []
    assert plain(task.run([row(1, 2, 100)], ms(9.9))) == []
    assert plain(task.run([row(1, 3, 1000), row(1, 12)], ms(10))) == [(1, 0, 10, 3, 106), (2, 0, 10, 1, 1)]
    assert plain(task.run([], ms(25))) == [(1, 10, 20, 2, 2)]
    assert task.table.entries == {}
    assert task.late_rows == [0, 0, 1, 0]


def test_windows_after_another_operator_end_after_its_rows() -> None:
    """Rows up to the new watermark are not late and belong to the windows that it ends; the next end is reported."""
    task = Task(Aggregate(Count(), windows=tumbling("at", 10 * SECOND)), ROWS, "Append")

    assert task.run([row(1, 1), row(2, 1), row(1, 11)], None) == []
    assert plain(task.run([row(1, 2), row(1, 12), row(3, 9)], None, ends_ms=ms(10))) == [
        (1, 0, 10, 2),
        (2, 0, 10, 1),
        (3, 0, 10, 1),
    ]
    assert task.late_rows == [0, 0]
    assert plain(task.run([], ms(10), ends_ms=ms(20))) == [(1, 10, 20, 2)]
    assert task.table.entries == {}
    assert (task.next_ends_ms[0], task.next_ends_ms[-1]) == (ms(10), None)


def test_update_mode_gives_changed_windows() -> None:
    """Update mode emits the windows of the batch's rows; ended windows are removed without output, as in Spark."""
    task = Task(Aggregate(Count(), windows=tumbling("at", 10 * SECOND)), ROWS)

    assert plain(task.run([row(1, 1), row(1, 11)])) == [(1, 0, 10, 1), (1, 10, 20, 1)]
    assert plain(task.run([row(1, 2), row(1, 12), row(1, None)], ms(10))) == [(1, 10, 20, 2)]
    assert len(task.table.entries) == 2  # state and index of one window


def test_offset_moves_windows() -> None:
    """Windows start at the offset, also for times before 1970."""
    task = Task(Aggregate(Count(), windows=tumbling("at", 10 * SECOND, offset=3 * SECOND)), ROWS)
    assert plain(task.run([row(1, 2.9), row(1, 3)])) == [(1, -7, 3, 1), (1, 3, 13, 1)]
    before = -BEGIN_S - 1
    assert plain(task.run([row(1, before)])) == [(1, before - 6, before + 4, 1)]


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.none() | st.integers(0, 2), st.integers(0, 60)), max_size=8), st.integers(0, 20)
        ),
        max_size=4,
    ),
    st.sampled_from([(10, 10), (10, 5), (10, 4), (7, 3)]),
)
def test_sliding_windows_equal_model(given_batches: list[Any], sizes: tuple[int, int]) -> None:
    """I14: each row counts in each of its open windows, or as late; each window ends once, with all its rows."""
    size, slide = sizes
    task = Task(Aggregate(Count(), windows=sliding("at", size * SECOND, slide * SECOND)), ROWS, "Append")
    open_windows: Counter[tuple[Any, int]] = Counter()
    watermark = 0
    for rows, advance in given_batches:
        watermark += advance
        ended = {window: n for window, n in open_windows.items() if window[1] + size <= watermark}
        got = task.run([row(key, second) for key, second in rows], ms(watermark))

        assert {(out["k"], int((out["window_start"] - BEGIN) / SECOND)): out["count(1)"] for out in got} == ended
        assert len(got) == len(ended)
        for window in ended:
            del open_windows[window]
        late_rows = 0
        for key, second in rows:
            late_rows += (second + BEGIN_S) // slide * slide - BEGIN_S + size <= watermark  # its newest window ended
            for start in range(-size - slide, second + 1):
                aligned = (start + BEGIN_S) % slide == 0
                if aligned and start <= second < start + size and start + size > watermark:
                    open_windows[key, start] += 1
        assert task.late_rows[-1] == late_rows
    assert len(task.table.entries) == 2 * len(open_windows)


def test_lost_entry_is_an_error() -> None:
    """I10: an index that names missing state is damage, not an empty window."""
    task = Task(Aggregate(Count(), windows=tumbling("at", 10 * SECOND)), ROWS, "Append")
    task.run([row(1, 1)])
    task.table.entries = {key: value for key, value in task.table.entries.items() if value == b""}
    with pytest.raises(CorruptDataError, match="index"):
        task.run([], ms(10))


def test_ended_windows_are_read_only_to_be_emitted() -> None:
    """In update mode, windows that end are removed without a read of their state."""
    task = Task(Aggregate(Count(), windows=tumbling("at", 10 * SECOND)), ROWS)
    task.run([row(1, 1), row(2, 1)])
    task.table.get_many = None  # type: ignore[method-assign, assignment]
    assert task.run([], ms(10)) == []
    assert not task.table.entries


def test_gaps_are_refused() -> None:
    """Windows with gaps or of size zero are refused."""
    for size, slide in ((10, 11), (10, 0), (0, 0)):
        with pytest.raises(InvalidInputError, match="slide"):
            sliding("at", size * SECOND, slide * SECOND)


@pytest.mark.parametrize("windows", [tumbling("v", SECOND), tumbling("nothing", SECOND)])
def test_windows_need_a_time(windows: Windows) -> None:
    """Windows over a column without times are refused when the query is created."""
    with pytest.raises(InvalidInputError, match="timestamp column"):
        Task(Aggregate(Count(), windows=windows), ROWS)
