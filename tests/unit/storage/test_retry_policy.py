"""When to retry."""

from __future__ import annotations

import pytest

from storage.errors import ErrorKind, InvalidInputError, error_from_dict
from storage.retry_policy import RETRYABLE_KINDS, RetryPolicy, is_retryable


@pytest.mark.parametrize("kind", ErrorKind)
def test_kind_decides_whether_to_retry(kind: ErrorKind) -> None:
    """Only errors that may pass by themselves are retried."""
    assert is_retryable(error_from_dict({"kind": kind.value})) == (kind.value in ("unavailable", "overloaded"))
    assert {ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED} == RETRYABLE_KINDS


def test_foreign_error_is_not_retried() -> None:
    """An error from outside the project is a bug, and is raised at once."""
    assert not is_retryable(OSError("disk"))


@pytest.mark.parametrize("fields", [{"timeout_ms": 0}, {"attempts_max": 0}, {"delay_after_error_ms": -1}])
def test_bad_policy_is_refused(fields: dict[str, int]) -> None:
    """A policy with no attempt or with negative delays is refused."""
    with pytest.raises(InvalidInputError):
        RetryPolicy(**fields)
