"""
The methods of a processor that may be left out: those of its base class do nothing, so a slip would have no effect.

No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from pyspark.sql.streaming import StatefulProcessor

from backend_client.columnar.processor import ColumnarProcessor
from backend_client.columnar.windows import Windows
from storage.errors import InvalidInputError

_ATTRIBUTES = {"windows": Windows, "expires": bool, "watermark_column": str}
"""What optional names are that are no methods."""

_ALIKE = 0.9
"""How alike a method's name and that of one of Spark's are, from 0 to 1, if the former is taken for a slip."""


def check_is_object(processor: Any) -> None:
    """Raise `InvalidInputError` for a class in the place of a processor."""
    if isinstance(processor, type):
        raise InvalidInputError(f"the processor is the class {processor.__name__}; give an object of it: …()")


def check_methods(operator: str, processor: Any, *, has_initial_rows: bool) -> None:
    """
    Check that rows of an initial state and timers find their methods.

    Args:
        operator: The operator's name.
        processor: Its processor.
        has_initial_rows: Whether the operator is given an initial state.

    Raises:
        InvalidInputError: It is no processor, a method looks like a misspelt one of Spark's, or no method takes the
            initial state.
    """
    check_is_object(processor)
    kind = type(processor)
    if not (hasattr(processor, "init") and hasattr(processor, "handleInputRows")):
        raise InvalidInputError(f"operator {operator!r} takes a StatefulProcessor, not {kind.__name__}")
    if slip := _slip(kind, StatefulProcessor, ("handleExpiredTimer", "handleInitialState")):
        raise InvalidInputError(
            f"the processor {kind.__name__} of operator {operator!r} has a method {slip[0]!r}, which is never called; "
            f"it looks like {slip[1]!r}"
        )
    if has_initial_rows and not _has(kind, StatefulProcessor, "handleInitialState"):
        raise InvalidInputError(
            f"operator {operator!r} has an initial state, but its processor {kind.__name__} has no method "
            "handleInitialState(key, initialState, timerValues), so its rows would be left out: define it"
        )


def check_columnar_names(operator: str, processor: ColumnarProcessor) -> None:
    """
    Check that the backend finds what a columnar processor defines.

    Raises:
        InvalidInputError: A method or an attribute of its class looks like a misspelt one of `ColumnarProcessor`.
    """
    kind = type(processor)
    optional = ("windows", "expired", "expires", "emits_expired", "watermark_column", "output_schema")
    if slip := _slip(kind, ColumnarProcessor, optional):
        raise InvalidInputError(
            f"the processor {kind.__name__} of operator {operator!r} has {slip[0]!r}, which the backend never uses; it "
            f"looks like {slip[1]!r}. Correct it, or begin its name with an underscore if it is your own"
        )


def _slip(kind: type, base: type, optional: Sequence[str]) -> tuple[str, str] | None:
    """Return a name of a class that looks like an optional one of its base, which it leaves out, and the latter."""
    names = [name for name in dir(kind) if not name.startswith("_") and not hasattr(base, name)]
    for name in optional:
        takes = _ATTRIBUTES.get(name, Callable)
        own = {_plain(one): one for one in names if _may_be_meant(getattr(kind, one, None), takes)}
        if not _has(kind, base, name) and (near := get_close_matches(_plain(name), own, 1, _ALIKE)):
            return own[near[0]], name
    return None


def _may_be_meant(value: Any, takes: Any) -> bool:
    """Return whether a value may be that of an optional name; helpers and constants may have names that are alike."""
    return value is None or isinstance(value, (property, takes))


def _has(kind: type, base: type, name: str) -> bool:
    return getattr(kind, name, None) is not getattr(base, name)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
