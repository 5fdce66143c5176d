"""When to try again."""

from __future__ import annotations

import pytest

from storage.errors import ConflictError, DstlError, ErrorKind, InvalidInputError, UnavailableError, error_from_dict
from storage.retry_policy import RETRYABLE_KINDS, RetryPolicy, is_retryable


@pytest.mark.parametrize("kind", ErrorKind)
def test_kind_decides_whether_to_retry(kind: ErrorKind) -> None:
    """Only what may pass by itself is tried again."""
    assert is_retryable(error_from_dict({"kind": kind.value})) == (kind.value in ("unavailable", "overloaded"))
    assert {ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED} == RETRYABLE_KINDS


def test_foreign_error_is_not_retried() -> None:
    """An error that is not ours is a bug, and shows at once."""
    assert not is_retryable(OSError("disk"))


@pytest.mark.parametrize(
    ("attempt", "error", "delay_ms"),
    [
        (1, None, 0),
        (1, UnavailableError("away"), 500),
        (2, UnavailableError("away"), 500),
        (3, None, None),
        (3, UnavailableError("away"), None),
        (1, ConflictError("other"), None),
        (1, RuntimeError("bug"), None),
    ],
)
def test_next_attempt_comes_in_time(attempt: int, error: DstlError | None, delay_ms: int | None) -> None:
    """After a time-out at once, after an error that may pass with a delay, else never."""
    assert RetryPolicy().delay_ms(attempt, error) == delay_ms


@pytest.mark.parametrize("fields", [{"timeout_ms": 0}, {"attempts_max": 0}, {"delay_after_error_ms": -1}])
def test_bad_policy_is_refused(fields: dict[str, int]) -> None:
    """A policy that never tries or waits backwards is a mistake."""
    with pytest.raises(InvalidInputError):
        RetryPolicy(**fields)
