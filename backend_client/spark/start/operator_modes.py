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


def check_modes(stored: OperatorInfo, wanted: OperatorInfo) -> None:
    """
    Check an operator's kind and modes against the stored ones.

    Raises:
        InvalidInputError: One of them differs; the message names the operator, the old and the new value.
    """
    if stored.kind != wanted.kind:
        was, now = (_APIS.get(operator.kind or "", "of an unreleased version") for operator in (stored, wanted))
        raise InvalidInputError(
            f"operator {wanted.name!r} was started with a processor that is {was}, now it is {now}; "
            "neither can read the other's state: use the stored kind again, or start with another job name and "
            "checkpointLocation"
        )
    for name, before, after in (
        ("timeMode", stored.time_mode, wanted.time_mode),
        ("outputMode", stored.output_mode, wanted.output_mode),
    ):
        if before != after:
            raise InvalidInputError(
                f"operator {wanted.name!r} was started with {name} {before!r}, now it has {after!r}; an operator's "
                f"modes cannot change: use {before!r} again, or start with another job name and checkpointLocation"
            )
