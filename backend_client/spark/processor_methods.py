"""
The methods of a ``StatefulProcessor`` that may be left out: Spark's own do nothing, so a slip would have no effect.

No I/O.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pyspark.sql.streaming import StatefulProcessor

from storage.errors import InvalidInputError

_ALIKE = 0.9
"""How alike a method's name and that of one of Spark's are, from 0 to 1, if the former is taken for a slip."""


def check_methods(operator: str, processor: Any, *, has_initial_rows: bool) -> None:
    """
    Check that rows of an initial state and timers find their methods.

    Args:
        operator: The operator's name.
        processor: Its processor.
        has_initial_rows: Whether the operator is given an initial state.

    Raises:
        InvalidInputError: A method looks like a misspelt one of Spark's, or no method takes the initial state.
    """
    kind = type(processor)
    own = {
        _plain(name): name for name in dir(kind) if not name.startswith("_") and not hasattr(StatefulProcessor, name)
    }
    for method in ("handleExpiredTimer", "handleInitialState"):
        if _has(kind, method):
            continue
        if near := get_close_matches(_plain(method), own, 1, _ALIKE):
            raise InvalidInputError(
                f"the processor {kind.__name__} of operator {operator!r} has a method {own[near[0]]!r}, which is never "
                f"called; it looks like {method!r}"
            )
    if has_initial_rows and not _has(kind, "handleInitialState"):
        raise InvalidInputError(
            f"operator {operator!r} has an initial state, but its processor {kind.__name__} has no method "
            "handleInitialState(key, initialState, timerValues), so its rows would be left out: define it"
        )


def _has(kind: type, method: str) -> bool:
    return getattr(kind, method, None) is not getattr(StatefulProcessor, method)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
