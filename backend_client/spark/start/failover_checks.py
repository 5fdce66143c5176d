"""Checks of what a query may set aside, and of rows that wait for it, before it takes its job over. Reads only."""

from __future__ import annotations

from collections.abc import Mapping

from backend_client.batch_time import TimeMode
from backend_client.failover.set_aside_entries import Waiting, companion_of, waiting_of, without_lost
from backend_client.settings import EXACT, FORGET, REPLAY
from backend_client.spark.columnar_plan import ColumnarPlan
from backend_client.spark.query import Operator, Query
from dstl_service.wire import CheckpointInfo, validate_operator
from storage.errors import InvalidInputError


def check_failover(query: Query, latest: CheckpointInfo | None, tables: Mapping[str, str]) -> None:
    """
    Check that the query's failover mode fits its operators, and that it can run the rows that wait for it.

    Args:
        query: The query.
        latest: The newest checkpoint.
        tables: The names of the operators' tables.

    Raises:
        InvalidInputError: It does not, or they have other columns than the query's rows, or would be late for a later
            operator.
    """
    names, settings = {*tables.values()}, query.settings
    for operator in query.operators:
        companion = companion_of(tables[operator.name])
        if companion in names:
            raise InvalidInputError(
                f"operator {companion!r} has the name under which rows of operator {operator.name!r} "
                "are set aside: give it another name (name=…)"
            )
        if settings.failover != EXACT:
            validate_operator(companion)
    if settings.failover != EXACT and len(query.operators) > 1 and any(map(_uses_watermark, query.operators)):
        raise InvalidInputError(
            f"failover={settings.failover!r} is not possible with several operators of which one uses event time: rows "
            "that the first one runs later would be late in the next one. Use failover='exact', or a query for each"
        )
    _check_waiting(query, latest, tables)


def _check_waiting(query: Query, latest: CheckpointInfo | None, tables: Mapping[str, str]) -> None:
    waiting = waiting_of(latest)
    stored = {info.name: info.key_schema for info in latest.operators} if latest else {}
    for operator in query.operators:
        companion, columns = companion_of(tables[operator.name]), operator.input_schema.simpleString()
        entries = waiting.get(companion, ())
        rows = sum(entry.rows for entry in (without_lost(entries) if query.settings.lost_rows == FORGET else entries))
        if rows and stored[companion] != columns:
            raise InvalidInputError(
                f"{rows} rows of operator {operator.name!r} are set aside, with the columns {stored[companion]}; now "
                f"they are {columns}. Let the query run once more as it was, until they have run, and change it then; "
                "of lost rows, either with lost_rows='replay', or now with lost_rows='forget'"
            )
    _check_not_late(query, waiting, tables)


def _check_not_late(query: Query, waiting: Mapping[str, Waiting], tables: Mapping[str, str]) -> None:
    """Refuse to run rows in a chain in which their output would be late: they may be of a query without it."""
    for place, operator in enumerate(query.operators):
        entries = waiting.get(companion_of(tables[operator.name]), ())
        runs = entries if query.settings.lost_rows == REPLAY else without_lost(entries)
        behind = [other.name for other in query.operators[place + 1 :] if _uses_watermark(other)]
        if runs and behind:
            raise InvalidInputError(
                f"{sum(entry.rows for entry in runs)} rows of operator {operator.name!r} wait in the log, or times of "
                f"its batches, and their output would be late for operator {behind[0]!r} after it, which uses "
                "event time. Let the query run once more as it was, until they have run; of lost rows, with "
                "lost_rows='replay'"
            )


def _uses_watermark(operator: Operator) -> bool:
    if isinstance(operator.processor, ColumnarPlan):
        return operator.processor.has_watermark
    return operator.time_mode is TimeMode.EVENT
