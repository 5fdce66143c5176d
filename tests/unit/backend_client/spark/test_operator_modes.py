"""A restart may change neither an operator's stored modes nor its kind."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from backend_client.columnar import Aggregate, Count
from backend_client.settings import BackendSettings
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.query import Operator
from backend_client.spark.start.checks import check_start
from backend_client.spark.start.operator_modes import COLUMNS, ROWS, check_modes, kind_of
from dstl_service.wire import OperatorInfo, StateInfo
from storage.errors import InvalidInputError

STORED = OperatorInfo("sessions", 2, "{}", {}, "EventTime", "Append", ROWS)


def test_same_modes_are_accepted() -> None:
    """An operator restarts with the modes it was stored with, at any parallelism."""
    check_modes(STORED, replace(STORED, parallelism=7))


@pytest.mark.parametrize("known", ["time_mode", "output_mode", None])
def test_modes_that_were_not_stored_may_be_any(known: str | None) -> None:
    """A job of a program that did not store modes restarts with any modes."""
    before = OperatorInfo("sessions", 2, "{}", {}, **({known: getattr(STORED, known)} if known else {}))

    check_modes(before, STORED)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            replace(STORED, time_mode="ProcessingTime"),
            "'sessions' was started with timeMode 'EventTime', now it has 'ProcessingTime'",
        ),
        (replace(STORED, time_mode="None"), "timeMode 'EventTime', now it has 'None'.*use 'EventTime' again, or start"),
        (
            replace(STORED, kind=COLUMNS),
            "'sessions' was started with a processor that is of the Row or pandas API, now it is colu",
        ),
        (replace(STORED, output_mode="Update"), "'sessions' was started with outputMode 'Append', now it has 'Update'"),
    ],
)
def test_other_modes_are_refused(changed: OperatorInfo, message: str) -> None:
    """For a changed mode, the error names the operator, both modes and the remedy."""
    with pytest.raises(InvalidInputError, match=message):
        check_modes(STORED, changed)


ROW_STATES = {"totals": StateInfo(1, "value", "{}")}
COLUMNAR_STATES = {"columns": StateInfo(1, "columns", "{}"), "ends": StateInfo(2, "ends", "{}")}


@pytest.mark.parametrize(
    ("stored", "states", "kind"),
    [
        (ROWS, COLUMNAR_STATES, ROWS),
        (None, ROW_STATES, ROWS),
        (None, {"columns": StateInfo(1, "value", "{}")}, ROWS),
        (None, COLUMNAR_STATES, COLUMNS),
        (None, {}, None),
    ],
)
def test_kind_is_stored_or_inferred_from_states(
    stored: str | None, states: dict[str, StateInfo], kind: str | None
) -> None:
    """An operator stored without a kind gets it from its states, whatever their names; without states any kind fits."""
    assert kind_of(replace(STORED, kind=stored, states=states)) == kind


@pytest.mark.parametrize(
    ("kind", "states", "columnar", "message"),
    [
        (ROWS, {}, True, "was started with a processor that is of the Row or pandas API, now it is columnar"),
        (None, ROW_STATES, True, "now it is columnar.*use the stored kind again, or start with another job name"),
        (COLUMNS, COLUMNAR_STATES, False, "with a processor that is columnar, now it is of the Row or pandas API"),
        (None, COLUMNAR_STATES, False, "now it is of the Row or pandas API"),
    ],
)
def test_operator_of_another_kind_is_refused(
    kind: str | None, states: dict[str, StateInfo], columnar: bool, message: str
) -> None:
    """A columnar processor on state of a row processor, or the reverse, is refused before it runs."""
    rows = StructType([StructField("k", StringType()), StructField("v", LongType())])
    processor: Any = ColumnarPlan.of(Aggregate(Count(name="n")), "update", rows, ["k"]) if columnar else object()
    operator = Operator("totals", processor, ("k",), rows, rows, {}, 2, ())
    stored = OperatorInfo("totals", 2, operator.key_schema.json(), states, "None", "Update", kind)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
    query: Any = SimpleNamespace(operators=[operator], settings=BackendSettings("file:///s", "job"), spark=spark)
    latest: Any = SimpleNamespace(operators=[stored])
    log: Any = None  # is not called: operators are checked first

    with pytest.raises(InvalidInputError, match=f"operator 'totals' .*{message}"):
        check_start(query, log, latest, 32768)
