"""Checks of a backend's options against each other, and of the changes of operators that they name. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
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
