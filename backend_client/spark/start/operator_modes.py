"""
What of an operator a restart may not change: its modes, which Spark's own operator keeps, too, and its kind. No I/O.

Stored timers and ends are read by the clock of their time mode, and what was put out so far was meant by the output
mode: with other modes both would mean something else without a word. And a processor of rows finds nothing of what a
columnar one has stored, nor the reverse: it would begin with empty state.
"""

from __future__ import annotations

from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError

ROWS, COLUMNS = "rows", "columns"
"""Kinds of an operator: that of the Row and pandas APIs, whose state is the same, and that of `transform_columns`."""

_APIS = {ROWS: "of the Row or pandas API", COLUMNS: "columnar"}
_COLUMNAR_STATES = {"columns", "ends"}


def check_modes(stored: OperatorInfo, wanted: OperatorInfo) -> None:
    """
    Compare an operator's kind and modes with those it was stored with; what was stored without modes goes on with any.

    Raises:
        InvalidInputError: One of them differs; names the operator and what it was and is.
    """
    was, now = kind_of(stored), kind_of(wanted)
    if was is not None and now is not None and was != now:
        raise InvalidInputError(
            f"operator {wanted.name!r} was started with a processor that is {_APIS[was]}, now it is {_APIS[now]}; "
            "neither can read what the other has stored: go back to the former, or begin anew with another job name "
            "and checkpointLocation"
        )
    for name, before, after in (
        ("timeMode", stored.time_mode, wanted.time_mode),
        ("outputMode", stored.output_mode, wanted.output_mode),
    ):
        if before is not None and before != after:
            raise InvalidInputError(
                f"operator {wanted.name!r} was started with {name} {before!r}, now it has {after!r}; an operator keeps "
                f"its modes: go back to {before!r}, or begin anew with another job name and checkpointLocation"
            )


def kind_of(operator: OperatorInfo) -> str | None:
    """Return an operator's kind; its states tell it where it was not stored, and without any it is None."""
    if operator.kind in _APIS or not operator.states:
        return operator.kind if operator.kind in _APIS else None
    return COLUMNS if {state.kind for state in operator.states.values()} & _COLUMNAR_STATES else ROWS
