"""
Timers as a processor sees them, on the real table with the real calls, compared with a short model.

The model is Spark's: if the watermark moved, a batch without data fires due timers; then the rows are processed; then
timers due at the end of the batch fire. Keys, batches and early change sets are of any number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StringType, StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.spark.task.row_calls import RowCalls, Timing
from backend_client.spark.task.rows import KeyRows
from backend_client.state.keyed_state import KeyedState
from backend_client.table.state_table import StateTable
from storage.key_groups import KeyGroupRange

KEYS = "abcdef"
GROUPS = KeyGroupRange(2, 5)
KEY_SCHEMA = StructType().add("k", StringType()).json()

Steps = list[tuple[str, int]]
steps = st.lists(st.tuples(st.sampled_from(["set", "set", "delete"]), st.integers(-3, 30)), max_size=4)
batches = st.lists(
    st.tuples(
        st.integers(0, 6), st.dictionaries(st.sampled_from(KEYS), steps), st.dictionaries(st.integers(-3, 30), steps)
    ),
    min_size=1,
    max_size=8,
)


class Timed(StatefulProcessor):
    """Does what rows say, and when a timer fires, what the plan says for its time."""

    def __init__(self, plan: dict[int, Steps]) -> None:
        self.plan = plan

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.perform(row)
            yield ("row", key[0], timerValues.getCurrentWatermarkInMs(), list(self.handle.listTimers()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        moment = expiredTimerInfo.getExpiryTimeInMs()
        assert isinstance(key, Row)
        yield ("fired", key.k, moment, list(self.handle.listTimers()))
        self.perform(self.plan.get(moment, []))

    def perform(self, steps: Steps) -> None:
        for verb, moment in steps:
            {"set": self.handle.registerTimer, "delete": self.handle.deleteTimer}[verb](moment)


class Sets:
    """Receives the change sets of a batch, like the log."""

    def __init__(self) -> None:
        self.changes: list[tuple[bytes, bytes | None]] = []

    def append(self, changes: dict[bytes, bytes | None], *, preemptive: bool) -> None:
        self.changes += sorted(changes.items())


class Model:
    """Timers per key, and Spark's expected reports."""

    def __init__(self) -> None:
        self.timers: dict[str, set[int]] = defaultdict(set)
        self.watermark = 0

    def batch(self, moved: int, rows: dict[str, Steps], plan: dict[int, Steps], *, fires_first: bool) -> list[Any]:
        """Fire timers in a batch without data before the rows, if the watermark moved, and after them."""
        self.watermark += moved
        seen = self.fire(plan) if moved and fires_first else []
        for key, todo in rows.items():
            self.perform(key, todo)
            seen.append(("row", key, self.watermark, sorted(self.timers[key])))
        return sorted(seen + self.fire(plan))

    def fire(self, plan: dict[int, Steps]) -> list[Any]:
        seen = []
        for key, timers in self.timers.items():
            for moment in sorted(timer for timer in timers if timer <= self.watermark):
                seen.append(("fired", key, moment, sorted(self.timers[key])))
                self.perform(key, plan.get(moment, []))
                self.timers[key].discard(moment)
        return seen

    def perform(self, key: str, todo: Steps) -> None:
        for verb, moment in todo:
            {"set": self.timers[key].add, "delete": self.timers[key].discard}[verb](moment)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StateTable]:
    """Return a table that is empty after each example."""
    table = StateTable.open(tmp_path_factory.mktemp("table"))
    yield table
    table.close()


@given(script=batches, preemptive_bytes=st.sampled_from([1, 60, 1 << 20]), fires_first=st.booleans())
@settings(deadline=None, max_examples=30)
def test_timers_fire_as_the_model_says(
    table: StateTable, script: list[Any], preemptive_bytes: int, *, fires_first: bool
) -> None:
    """I14: fired timers, their times, and each call's view of a key's timers are the model's, however sets are cut."""
    table.advance([(key, None) for key, _ in list(table.items())], "empty")
    model = Model()
    for number, (moved, rows, plan) in enumerate(script):
        before = model.watermark
        expected = model.batch(moved, rows, plan, fires_first=fires_first)
        timing = Timing(TimeMode.EVENT, BatchTime(1, model.watermark, before), fires_first=fires_first and moved > 0)
        calls = RowCalls("timed", Timed(plan), {}, KEY_SCHEMA, preemptive_bytes, timing=timing)
        state, sets = KeyedState(table.get, GROUPS, table.scan, number), Sets()
        grouped = [KeyRows(2 + ord(key) % 4, (key,), iter([rows[key]])) for key in rows]
        grouped.sort(key=lambda item: (item.key_group, item.key))
        # Replaces a log writer.
        seen = [row for part in calls.run(grouped, state, sets) for row in part]  # type: ignore[arg-type]
        sets.append(state.take_changes(), preemptive=False)
        table.advance(sets.changes, f"{number}.0.u")
        assert sorted(seen) == expected
    assert len(list(table.items())) == 2 * sum(len(timers) for timers in model.timers.values())
