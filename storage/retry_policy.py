"""
Decides which errors are retried, and when. Pure: no I/O, no clock.

| kind of error               | again? | why                                                          |
|-----------------------------|--------|--------------------------------------------------------------|
| unavailable, overloaded     | yes    | temporary, or its operator repairs it                        |
| conflict, fenced            | no     | another writer was first; a retry cannot change that         |
| not_found                   | no     | stores are consistent: a missing object was not written      |
| corrupt_data, lost_changes  | no     | the bytes are gone; a retry would hide it                    |
| invalid_input, internal     | no     | a bug, which the next attempt has, too                       |
| unauthorized                | no     | the token stays wrong until it is replaced                   |
| closed                      | no     | the caller asked to stop                                     |

Exceptions other than this project's are bugs and are not retried.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import DstlError, ErrorKind, InvalidInputError

RETRYABLE_KINDS = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED})


def is_retryable(error: BaseException) -> bool:
    """Return whether a retry of the same call may succeed."""
    return isinstance(error, DstlError) and error.kind in RETRYABLE_KINDS


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """
    The number of attempts of an upload, and their timing.

    A timeout starts the next attempt at once while the previous one continues; the first to finish wins (I6).
    A retryable error starts the next attempt after a delay; any other error ends the upload.
    """

    timeout_ms: int = 1_000
    """How long an attempt runs alone, > 0. A shorter one gives more slow uploads a second attempt, for more PUTs."""
    attempts_max: int = 3
    """Total attempts of one upload, >= 1."""
    delay_after_error_ms: int = 500
    """Wait before the attempt after an error, >= 0."""

    def __post_init__(self) -> None:
        if self.timeout_ms <= 0 or self.attempts_max < 1 or self.delay_after_error_ms < 0:
            raise InvalidInputError(
                "a retry policy needs timeout_ms > 0, attempts_max >= 1 and delay_after_error_ms >= 0, "
                f"not {self.timeout_ms}, {self.attempts_max} and {self.delay_after_error_ms}"
            )
