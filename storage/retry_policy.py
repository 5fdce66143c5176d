"""
When to try again. Pure: no I/O, no clock.

| kind of error               | again? | why                                                          |
|-----------------------------|--------|--------------------------------------------------------------|
| unavailable, overloaded     | yes    | passes, or its operator repairs it                           |
| conflict, fenced            | no     | somebody else was first; a repetition cannot change that     |
| not_found                   | no     | stores are consistent: what is not there now was not written |
| corrupt_data, lost_changes  | no     | the bytes are gone; a repetition hides it                    |
| invalid_input, internal     | no     | a bug, and the next attempt has it too                       |
| unauthorized                | no     | the token is wrong until somebody gives another              |
| closed                      | no     | somebody wants us to stop                                    |

Errors that are not of this project are bugs and are not retried.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.errors import DstlError, ErrorKind, InvalidInputError

RETRYABLE_KINDS = frozenset({ErrorKind.UNAVAILABLE, ErrorKind.OVERLOADED})


def is_retryable(error: BaseException) -> bool:
    """Tell whether a repetition of the same call may succeed."""
    return isinstance(error, DstlError) and error.kind in RETRYABLE_KINDS


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """
    How often, and after what wait, an upload is tried again.

    A time-out starts the next attempt at once while the one before goes on; the first to finish wins (I6).
    An error that may pass starts the next one after a delay; any other error ends the upload.
    """

    timeout_ms: int = 1_000
    """How long an attempt runs alone, > 0. Shorter hedges more slow uploads and costs more PUTs."""
    attempts_max: int = 3
    """Attempts of one upload in all, >= 1."""
    delay_after_error_ms: int = 500
    """Wait before the attempt after an error, >= 0."""

    def __post_init__(self) -> None:
        if self.timeout_ms <= 0 or self.attempts_max < 1 or self.delay_after_error_ms < 0:
            raise InvalidInputError(
                "a retry policy needs timeout_ms > 0, attempts_max >= 1 and delay_after_error_ms >= 0, "
                f"not {self.timeout_ms}, {self.attempts_max} and {self.delay_after_error_ms}"
            )
