"""
Checks of options against each other and of single arguments.

A backend's options, the changes of operators that they name, and what users give to ready-made processors. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from numbers import Integral
from typing import Any

from storage.errors import InvalidInputError
from storage.validation import validate_name

_BOUNDS = {
    "standby_bytes_max": "standby_replicas",
    "autoscale_min": "autoscale_batch_ms",
    "autoscale_max": "autoscale_batch_ms",
    "max_stall_s": "failover",
    "max_deferred_bytes": "failover",
    "max_lost_fraction": "failover",
}
"""Options that bound what another one switches on, which is off unless it is given."""

_MICROSECOND = timedelta(microseconds=1)
_LONGEST = timedelta(days=3_650_000)
"""About ten thousand years: times and a few such durations together fit 64 bits of microseconds."""

_WHOLE: Any = Integral
"""Whole numbers, NumPy's among them; for type checkers, Python's are none."""


def check_bounds(options: Iterable[str]) -> None:
    """Raise `InvalidInputError` if an option bounds what is off, without a word of whether it is to be on."""
    for name in options:
        switch = _BOUNDS.get(name)
        if switch is not None and switch not in options:
            raise InvalidInputError(
                f"{name} has no effect without {switch}, which is off by default: give {switch}=… too, even if it is "
                f"to stay off, or leave {name} out"
            )


def operator_changes(renamed: Any, removed: Any) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """
    Return the settings `renamed` and `removed` as sorted tuples.

    Raises:
        InvalidInputError: They have another form, or a name that is not allowed.
    """
    pairs = renamed.items() if isinstance(renamed, Mapping) else renamed
    names: Any = None if isinstance(removed, str) else removed
    valid = partial(validate_name, "operator")
    try:
        return (
            tuple(sorted((valid(old), valid(new)) for old, new in map(_pair, pairs))),
            tuple(sorted(set(map(valid, names)))),
        )
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            'renamed must be like {"former name": "present name"} and removed like ("name",), not '
            f"{renamed!r} and {removed!r}"
        ) from error


def _pair(given: Any) -> Any:
    if isinstance(given, str):  # of two letters, it would pass for a pair
        raise TypeError(given)
    return given


def micros(what: str, duration: Any) -> int:
    """
    Return a duration in microseconds.

    Args:
        what: What it is, for the error.
        duration: What the user gave.

    Raises:
        InvalidInputError: It is no timedelta, or too long.
    """
    if not isinstance(duration, timedelta):
        raise InvalidInputError(f"{what} must be a datetime.timedelta, such as timedelta(minutes=10), not {duration!r}")
    if abs(duration) > _LONGEST:
        raise InvalidInputError(f"{what} must be at most {_LONGEST.days} days, not {duration}")
    return duration // _MICROSECOND


def check_whole(what: str, number: Any, at_least: int, at_most: int) -> None:
    """Refuse what is no whole number, of Python or NumPy, within these bounds, both included: `InvalidInputError`."""
    if not isinstance(number, _WHOLE) or isinstance(number, bool) or not at_least <= number <= at_most:
        raise InvalidInputError(f"{what} must be a whole number, {at_least} to {at_most}, not {number!r}")


def check_column(what: str, column: Any) -> None:
    """Refuse what is no name of a column, such as Spark's ``col("name")``, with `InvalidInputError`."""
    if not isinstance(column, str):
        raise InvalidInputError(f"{what} takes the name of a column as text, such as 'price', not {column!r}")
