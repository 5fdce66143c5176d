"""
All errors that this project raises on purpose. Imports nothing from the project.

A class says what the caller must do, not where the error arose:

    DstlError
    ├── InvalidInputError  (ValueError)   caller or configuration bug: fix it, do not retry
    ├── UnauthorizedError                 the token is missing or wrong: supply the right one
    ├── NotFoundError      (LookupError)  the named thing does not exist: decide whether that is allowed
    ├── ConflictError                     another writer was first: read again, then decide
    ├── FencedError                       a newer epoch has begun: stop writing for good
    ├── UnavailableError                  store or peer does not work now: retry after a delay
    ├── OverloadedError                   a limit is reached: back off, then retry
    ├── CorruptDataError                  stored bytes are damaged: never retry, alert
    │   └── NewerFormatError              or are of a newer version: use that one
    ├── ClosedError                       this object was closed: open a new one, or stop
    ├── LostChangesError                  a change set was received but never made durable and is gone:
    │                                     execute the batch again
    └── InternalError                     a bug of this project: report it

Errors survive pickling (Spark ships them between processes) and HTTP (`to_dict`, `error_from_dict`).
Message texts are not an interface; `kind` is, and values are only ever added to it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

ContextValue: TypeAlias = str | int | float | bool | list[str] | list[int] | None
"""Values that an error may carry besides its message: JSON-able, small, never a secret."""


class ErrorKind(enum.StrEnum):
    """The caller's next step, as a stable code. Append only."""

    INVALID_INPUT = "invalid_input"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    FENCED = "fenced"
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    CORRUPT_DATA = "corrupt_data"
    CLOSED = "closed"
    LOST_CHANGES = "lost_changes"
    INTERNAL = "internal"
    UNAUTHORIZED = "unauthorized"


class DstlError(Exception):
    """
    The root of all errors of this project. Raise a subclass.

    Args:
        message: One sentence that names the failure and, if there is one, the remedy.
        context: JSON-able facts for logs and for programs, for example `key="a/b.seg"`; never a secret.
    """

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    def __init__(self, message: str, /, **context: ContextValue) -> None:
        super().__init__(message)
        self.message = message
        self.context: dict[str, ContextValue] = context

    def __str__(self) -> str:
        if not self.context:
            return self.message
        facts = ", ".join(f"{name}={value!r}" for name, value in self.context.items())
        return f"{self.message} ({facts})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.context)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"kind", "message", "context"}`, all JSON-able."""
        return {"kind": self.kind.value, "message": self.message, "context": dict(self.context)}


class InvalidInputError(DstlError, ValueError):
    """An argument, a request or a setting is wrong. Fix it; a retry cannot help."""

    kind = ErrorKind.INVALID_INPUT


class UnauthorizedError(DstlError):
    """The service requires a token, and the request had none or a wrong one. Supply the right one."""

    kind = ErrorKind.UNAUTHORIZED


class NotFoundError(DstlError, LookupError):
    """The named object, checkpoint or job does not exist."""

    kind = ErrorKind.NOT_FOUND


class ConflictError(DstlError):
    """The thing to create exists with other content. Read it again, then decide."""

    kind = ErrorKind.CONFLICT


class FencedError(DstlError):
    """A newer epoch has begun, so this writer may no longer write. Stop; a retry is never right."""

    kind = ErrorKind.FENCED

    @classmethod
    def taken_over(cls, job: str, epoch: int, newer_epoch: int) -> FencedError:
        """Return the error for a query that runs as `epoch` while the job belongs to a newer one."""
        return cls(
            f"job {job!r} was taken over by epoch {newer_epoch}; this query runs as epoch {epoch} and must stop",
            epoch=epoch,
            newer_epoch=newer_epoch,
        )


class UnavailableError(DstlError):
    """The store or a peer cannot serve now, or not until its operator acts. Retry after a delay."""

    kind = ErrorKind.UNAVAILABLE


class OverloadedError(DstlError):
    """A limit is reached. Back off, then retry."""

    kind = ErrorKind.OVERLOADED


class CorruptDataError(DstlError):
    """Stored bytes differ from what was written. Never retry, never skip; alert."""

    kind = ErrorKind.CORRUPT_DATA


class NewerFormatError(CorruptDataError):
    """A newer version of this program wrote the object, which is not damaged. Use that version; repair nothing."""

    @classmethod
    def check(cls, what: str, found: int, newest: int, **context: ContextValue) -> None:
        """Raise if the format `found` is newer than the `newest` that this version reads; `what` names the object."""
        if found > newest:
            raise cls(
                f"{what} was written by a newer version of this program and is not damaged: its format {found} is "
                f"newer than {newest}, the newest that this version reads. Use the newer version, on all hosts and for "
                "commands, and repair or delete nothing with this one",
                **context,
            )


class ClosedError(DstlError):
    """The store, log or service was closed before the call."""

    kind = ErrorKind.CLOSED


class LostChangesError(DstlError):
    """A change set that was received but never made durable is gone. The batch must be executed again."""

    kind = ErrorKind.LOST_CHANGES


class InternalError(DstlError):
    """An impossible condition occurred. A bug of this project; report it."""

    kind = ErrorKind.INTERNAL


_CLASS_OF_KIND: Mapping[str, type[DstlError]] = {
    error_class.kind.value: error_class
    for error_class in (
        InvalidInputError,
        UnauthorizedError,
        NotFoundError,
        ConflictError,
        FencedError,
        UnavailableError,
        OverloadedError,
        CorruptDataError,
        ClosedError,
        LostChangesError,
        InternalError,
    )
}


def error_from_dict(data: Mapping[str, Any]) -> DstlError:
    """
    Rebuild the error that `DstlError.to_dict` described.

    Args:
        data: The document of a peer. Its kind may be of a newer version; fields may be missing or of another type.

    Returns:
        An error of the class of `kind`; an `InternalError` if the kind is unknown. Never raises.
    """
    kind = data.get("kind")
    error_class = _CLASS_OF_KIND.get(kind, InternalError) if isinstance(kind, str) else InternalError
    context = data.get("context")
    facts = {str(name): value for name, value in context.items()} if isinstance(context, Mapping) else {}
    if error_class is InternalError and kind != ErrorKind.INTERNAL:
        facts["unknown_kind"] = str(kind)
    return error_class(str(data.get("message", "no message")), **facts)


def _rebuild(error_class: type[DstlError], message: str, context: dict[str, ContextValue]) -> DstlError:
    return error_class(message, **context)
