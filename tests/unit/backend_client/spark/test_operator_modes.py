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
from backend_client.spark.start.operator_modes import COLUMNS, ROWS, check_modes
from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError

STORED = OperatorInfo("sessions", 2, "{}", {}, "EventTime", "Append", ROWS)


def test_same_modes_are_accepted() -> None:
    """An operator restarts with the modes it was stored with, at any parallelism."""
    check_modes(STORED, replace(STORED, parallelism=7))


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
        (replace(STORED, kind="tables"), "is of the Row or pandas API, now it is of an unreleased version"),
        (replace(STORED, output_mode="Update"), "'sessions' was started with outputMode 'Append', now it has 'Update'"),
    ],
)
def test_other_modes_are_refused(changed: OperatorInfo, message: str) -> None:
    """For a changed mode, the error names the operator, both modes and the remedy."""
    with pytest.raises(InvalidInputError, match=message):
        check_modes(STORED, changed)


@pytest.mark.parametrize(
    ("kind", "columnar", "message"),
    [
        (ROWS, True, "was started with a processor that is of the Row or pandas API, now it is columnar"),
        (COLUMNS, False, "with a processor that is columnar, now it is of the Row or pandas API.*use the stored kind"),
    ],
)
def test_operator_of_another_kind_is_refused(kind: str, columnar: bool, message: str) -> None:
    """A columnar processor on state of a row processor, or the reverse, is refused before it runs."""
    rows = StructType([StructField("k", StringType()), StructField("v", LongType())])
    processor: Any = ColumnarPlan.of(Aggregate(Count(name="n")), "update", rows, ["k"]) if columnar else object()
    operator = Operator("totals", processor, ("k",), rows, rows, {}, 2, ())
    stored = OperatorInfo("totals", 2, operator.key_schema.json(), {}, "None", "Update", kind)
    spark = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
    query: Any = SimpleNamespace(operators=[operator], settings=BackendSettings("file:///s", "job"), spark=spark)
    latest: Any = SimpleNamespace(operators=[stored])
    log: Any = None  # is not called: operators are checked first

    with pytest.raises(InvalidInputError, match=f"operator 'totals' .*{message}"):
        check_start(query, log, latest, 32768)
