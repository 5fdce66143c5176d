"""
Which modes of an operator a restart may not change: those that Spark's own operator keeps, too. No I/O.

Stored timers and ends are read by the clock of their time mode, and what was put out so far was meant by the output
mode: with other modes both would mean something else without a word.
"""

from __future__ import annotations

from dstl_service.wire import OperatorInfo
from storage.errors import InvalidInputError


def check_modes(stored: OperatorInfo, wanted: OperatorInfo) -> None:
    """
    Compare an operator's modes with those it was stored with; what was stored without them goes on with any.

    Raises:
        InvalidInputError: One of them differs; names the operator and both modes.
    """
    for name, before, now in (
        ("timeMode", stored.time_mode, wanted.time_mode),
        ("outputMode", stored.output_mode, wanted.output_mode),
    ):
        if before is not None and before != now:
            raise InvalidInputError(
                f"operator {wanted.name!r} was started with {name} {before!r}, now it has {now!r}; an operator keeps "
                f"its modes: go back to {before!r}, or begin anew with another job name and checkpointLocation"
            )
