"""How tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_POLL_S = 0.02
_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T | None], timeout_s: float = 60.0, what: str = "the condition") -> _T:
    """Return the condition's first true value; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {timeout_s} s")
        time.sleep(_POLL_S)
    return value
