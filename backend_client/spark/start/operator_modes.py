"""
An operator's modes and kind, which a restart may not change; Spark's own operator keeps its modes, too. No I/O.

Stored timers and ends are read by the clock of their time mode, and earlier output followed the output mode: other
modes would silently change the meaning of both. A row processor finds nothing that a columnar one stored, and the
reverse: it would start with empty state.
"""

from __future__ import annotations

from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError

ROWS, COLUMNS = "rows", "columns"
"""An operator's kind: that of the Row and pandas APIs, which share their state, or that of `transform_columns`."""

_APIS = {ROWS: "of the Row or pandas API", COLUMNS: "columnar"}
_COLUMNAR_STATES = {"columns", "ends"}


def check_modes(stored: OperatorInfo, wanted: OperatorInfo) -> None:
    """
    Check an operator's kind and modes against the stored ones; state stored without modes accepts any.

    Raises:
        InvalidInputError: One of them differs; the message names the operator, the old and the new value.
    """
    was, now = kind_of(stored), kind_of(wanted)
    if was is not None and now is not None and was != now:
        raise InvalidInputError(
            f"operator {wanted.name!r} was started with a processor that is {_APIS[was]}, now it is {_APIS[now]}; "
            "neither can read the other's state: use the stored kind again, or start with another job name and "
            "checkpointLocation"
        )
    for name, before, after in (
        ("timeMode", stored.time_mode, wanted.time_mode),
        ("outputMode", stored.output_mode, wanted.output_mode),
    ):
        if before is not None and before != after:
            raise InvalidInputError(
                f"operator {wanted.name!r} was started with {name} {before!r}, now it has {after!r}; an operator's "
                f"modes cannot change: use {before!r} again, or start with another job name and checkpointLocation"
            )


def kind_of(operator: OperatorInfo) -> str | None:
    """Return an operator's kind; if it was not stored, infer it from the states; None without states."""
    if operator.kind in _APIS or not operator.states:
        return operator.kind if operator.kind in _APIS else None
    return COLUMNS if {state.kind for state in operator.states.values()} & _COLUMNAR_STATES else ROWS
