"""
The facts that a batch of a columnar operator passes to the next one.

A failure means wrong results after rows were set aside, or ended state that stays forever.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from backend_client.batch_time import BatchTime
from backend_client.columnar import Aggregate, Count, TopK
from backend_client.failover.patience import Patience, TaskFailover
from backend_client.settings import BackendSettings
from backend_client.spark.batch import BatchContext, Receipt
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.combining import ROWS_MIN
from backend_client.spark.driver.columnar_history import ColumnarHistory
from backend_client.spark.query import Operator
from dstl_service.wire import CheckpointRef
from tests.unit.backend_client.columnar.columnar_task import with_watermark

ROWS = pa.schema([("k", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
EXACT = TaskFailover()


def history(*aggregations: Any) -> ColumnarHistory:
    schema = with_watermark(ROWS, "at")
    plan = ColumnarPlan.of(Aggregate(*aggregations), "Update", schema, ["k"])
    return ColumnarHistory([Operator("op", plan, ("k",), schema, StructType(), plan.states(), None, ())])


def batch(number: int, base: int | None = None, watermark_ms: int = 7) -> BatchContext:
    settings = BackendSettings("file:///tmp/x", "job")
    ref = None if base is None else CheckpointRef(base, 0, "0" * 32)
    time = BatchTime(timestamp_ms=0, watermark_ms=watermark_ms, previous_watermark_ms=watermark_ms)
    return BatchContext(settings, "uid", 1, number, ref, "coordinator", time=time)


def receipt(rows: int, groups: int) -> Receipt:
    return Receipt("op", 0, 0, rows, groups, 0, [], groups=groups)


def test_rows_are_combined_while_there_are_many_per_group() -> None:
    """Few rows, or rows of many keys, are not combined; some rows per key less do not end it at once."""
    known = history(Count())
    assert known.combining("op", EXACT) is None
    for rows, groups, combines in (
        (ROWS_MIN - 1, 1, False),
        (ROWS_MIN, ROWS_MIN // 3, False),
        (ROWS_MIN, ROWS_MIN // 4, True),
        (ROWS_MIN, ROWS_MIN // 3, True),
        (ROWS_MIN, ROWS_MIN - 1, False),
        (ROWS_MIN, 0, True),
        (0, 0, False),
    ):
        known.took("op", batch(0), [receipt(rows, groups)])
        assert (known.combining("op", EXACT) is not None) is combines


def test_rows_that_may_be_logged_come_as_they_are() -> None:
    """A task that may set its rows aside, or runs earlier ones, gets rows, which an operator runs later."""
    known = history(Count())
    known.took("op", batch(0), [receipt(ROWS_MIN, 1)])
    for failover in (
        TaskFailover(patience={1: Patience(1.0, sets_aside=True)}),
        TaskFailover(waiting={0: ()}),
    ):
        assert known.combining("op", failover) is None
        assert known.removed_ms("op", batch(1, 0), failover) is None
    assert known.combining("op", TaskFailover(patience={1: Patience(1.0, sets_aside=False)})) is not None


def test_what_cannot_be_combined_is_not() -> None:
    """An aggregation that Spark cannot compute, and an operator that is not columnar, never are."""
    known = history(Count(), TopK("k"))
    known.took("op", batch(0), [receipt(ROWS_MIN, 1)])
    known.took("other", batch(0), [receipt(ROWS_MIN, 1)])
    assert known.combining("op", EXACT) is None
    assert known.combining("other", EXACT) is None


@pytest.mark.parametrize(("base", "known_ms"), [(3, 7), (2, None), (None, None)])
def test_removed_state_is_that_of_the_base(base: int | None, known_ms: int | None) -> None:
    """Only the batch on whose checkpoint this one builds says what is gone; a try that was given up does not."""
    known = history(Count())
    known.took("op", batch(3), [receipt(1, 1)])
    assert known.removed_ms("op", batch(4, base), EXACT) == known_ms


def test_stalled_partition_has_removed_nothing() -> None:
    """If a partition did not run, the next batch looks for all ended state."""
    known = history(Count())
    known.took("op", batch(3), [receipt(1, 1), replace(receipt(0, 0), is_stalled=True)])
    assert known.removed_ms("op", batch(4, 3), EXACT) is None
