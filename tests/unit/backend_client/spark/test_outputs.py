"""When a batch waits for the output of those before it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StructType

from backend_client.sinks.parquet import ParquetSink
from backend_client.spark.output.outputs import SinkOutput, SinkPlan
from backend_client.spark.output.publisher import Publisher
from dstl_service.wire import CheckpointInfo, CheckpointRef, OperatorInfo

FIRST, LAST = OperatorInfo("first", 4, "{}", {}), OperatorInfo("last", 4, "{}", {}, called="renamed")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch has waited until everything before it was published."""
    found: list[bool] = []
    monkeypatch.setattr(Publisher, "wait_for_room", lambda _, *, until_empty=False: found.append(until_empty))
    return found


def output(*operators: OperatorInfo) -> SinkOutput:
    """Return the output of a query whose newest checkpoint has these operators."""
    nothing: Any = None
    latest = CheckpointInfo(CheckpointRef(9, 0, "m"), None, 1, 0, "q", "", list(operators), 0, 0)
    session: Any = SimpleNamespace(latest=latest if operators else None, check_owned=lambda: None)
    shipments: Any = SimpleNamespace(parcel=lambda sink: sink)
    plan = SinkPlan(ParquetSink("file:///tmp/out"), "out", 2, StructType())
    return SinkOutput(plan, nothing, session, shipments, nothing)


@pytest.mark.parametrize(
    ("stored", "last", "must_wait"),
    [
        ((), LAST, False),
        ((FIRST, LAST), LAST, False),
        ((FIRST, LAST), OperatorInfo("last", 5, "{}", {}), True),
        ((FIRST, LAST), FIRST, True),
        ((FIRST,), LAST, True),
    ],
)
def test_batch_waits_where_keys_move(
    waits: list[bool], stored: tuple[OperatorInfo, ...], last: OperatorInfo, must_wait: bool
) -> None:
    """
    Keys move to other slots with another parallelism, and with another last operator.

    What a crash leaves is published by slots side by side, so keys must have one slot in all of it.
    """
    made = output(*stored)
    for _ in range(2):
        made.before_batch(last)
    assert waits == [must_wait, False]
