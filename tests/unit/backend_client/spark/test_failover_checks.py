"""Queries whose failover mode or waiting rows do not fit are refused before they take their job over."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import StructType

from backend_client.batch_time import TimeMode
from backend_client.settings import BackendSettings
from backend_client.spark.query import Operator, Query
from backend_client.spark.start.failover_checks import check_failover
from dstl_service.wire import SET_ASIDE, CheckpointInfo, CheckpointRef, OperatorInfo, RowsSetAside
from storage.errors import InvalidInputError

SCHEMA = StructType().add("k", "string").add("v", "double")


def query(*operators: tuple[str, TimeMode], **settings: Any) -> Query:
    """Return a query with these operators."""
    nothing: Any = None
    made = [
        Operator(name, nothing, ("k",), SCHEMA, SCHEMA, {}, None, (), time_mode=time_mode)
        for name, time_mode in operators
    ]
    return Query(nothing, tuple(made), (), BackendSettings("file:///tmp/s", "job", **settings))


def checkpoint(columns: str, *waiting: RowsSetAside) -> CheckpointInfo:
    """Return a checkpoint in which rows of operator `a` wait."""
    companion = OperatorInfo("a.set-aside", 2, columns, {}, kind=SET_ASIDE, set_aside=list(waiting))
    return CheckpointInfo(CheckpointRef(5, 0, "u"), None, 1, 0, "", "", [companion], 0, 0)


def check(starting: Query, latest: CheckpointInfo | None) -> None:
    """Check a query whose operators were never renamed."""
    check_failover(starting, latest, {operator.name: operator.name for operator in starting.operators})


def test_chain_in_event_time_is_exact_only() -> None:
    """Rows that one operator runs later would be late for the next, so the other modes are refused."""
    chain = (("a", TimeMode.NONE), ("b", TimeMode.EVENT))
    check(query(*chain), None)
    check(query(chain[1], failover="deferred"), None)
    check(query(("a", TimeMode.NONE), ("b", TimeMode.PROCESSING), failover="deferred"), None)
    for mode in ("deferred", "bounded-loss"):
        with pytest.raises(InvalidInputError, match="would be late in the next one"):
            check(query(*chain, failover=mode), None)


def test_names_of_companions_are_taken() -> None:
    """No operator has the name under which another one's rows are set aside, and that name is valid."""
    with pytest.raises(InvalidInputError, match="give it another name"):
        check(query(("a", TimeMode.NONE), ("a.set-aside", TimeMode.NONE)), None)
    long = ("a" * 120, TimeMode.NONE)
    check(query(long), None)
    with pytest.raises(InvalidInputError, match="is not allowed"):
        check(query(long, failover="deferred"), None)


def test_waiting_rows_have_the_query_columns() -> None:
    """Rows of other columns are never given to a processor; lost ones may be forgotten instead."""
    one, entry = query(("a", TimeMode.NONE)), RowsSetAside(4, 0, 9, 5, 70)
    lost = RowsSetAside(4, 0, 9, 5, 70, is_lost=True)
    check(one, checkpoint(SCHEMA.simpleString(), entry))
    check(one, checkpoint("struct<k:string>"))
    for waiting in (entry, lost):
        with pytest.raises(InvalidInputError, match="5 rows of operator 'a' are set aside"):
            check(one, checkpoint("struct<k:string>", waiting))
    forgetting = query(("a", TimeMode.NONE), lost_rows="forget")
    check(forgetting, checkpoint("struct<k:string>", lost))
    with pytest.raises(InvalidInputError, match="are set aside"):
        check(forgetting, checkpoint("struct<k:string>", entry))


def test_waiting_rows_are_not_late_for_a_new_operator() -> None:
    """A restart may add an operator in event time before them, not after them: it would drop their output."""
    columns = SCHEMA.simpleString()
    chain = query(("a", TimeMode.NONE), ("b", TimeMode.EVENT))
    for waiting in (RowsSetAside(4, 0, 9, 5, 70), RowsSetAside(4, 0, 9, 0, 0)):
        with pytest.raises(InvalidInputError, match="would be late for operator 'b'"):
            check(chain, checkpoint(columns, waiting))
        check(query(("a", TimeMode.NONE), ("b", TimeMode.PROCESSING)), checkpoint(columns, waiting))
        check(query(("b", TimeMode.EVENT), ("a", TimeMode.NONE)), checkpoint(columns, waiting))
    check(chain, checkpoint(columns))
    lost = checkpoint(columns, RowsSetAside(4, 0, 9, 5, 70, is_lost=True))
    check(chain, lost)
    replaying = query(("a", TimeMode.NONE), ("b", TimeMode.EVENT), lost_rows="replay")
    with pytest.raises(InvalidInputError, match="would be late for operator 'b'"):
        check(replaying, lost)
