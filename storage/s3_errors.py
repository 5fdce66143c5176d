"""
The meaning of an S3 server's errors: their class, and advice. Pure.

Codes come first; an unknown code falls back on its status, an unknown status on its hundred.
"""

from __future__ import annotations

from collections.abc import Mapping

from storage.errors import (
    CorruptDataError,
    DstlError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)

FOREIGN = "the answer is not that of an S3 server; check the endpoint"
LOOK_UP = "look up"
"""The verb of HEAD, whose answers have no body, and so no code."""

_UNHEARD_OF = "the server answered 404 with a code that is not about the object; check credentials and endpoint"

_ERRORS: Mapping[str, tuple[type[DstlError], str]] = {
    "NoSuchKey": (NotFoundError, "the object does not exist"),
    "NotFound": (NotFoundError, "the object does not exist"),
    "NoSuchBucket": (UnavailableError, "the bucket does not exist; create it, or correct the URL"),
    "PermanentRedirect": (UnavailableError, "the bucket is in another region; set the option region"),
    "AuthorizationHeaderMalformed": (UnavailableError, "the bucket is in another region; set the option region"),
    "AccessDenied": (UnavailableError, "access denied; grant GetObject, PutObject, DeleteObject and ListBucket"),
    "InvalidAccessKeyId": (UnavailableError, "the access key is unknown; check the credentials"),
    "SignatureDoesNotMatch": (UnavailableError, "the signature is wrong; check the credentials"),
    "ExpiredToken": (UnavailableError, "the session token has expired; renew the credentials"),
    "RequestTimeTooSkewed": (UnavailableError, "the clocks differ too much; set the clock of this host"),
    "SlowDown": (UnavailableError, "the store asks to slow down"),
    "RequestTimeout": (UnavailableError, "the store did not get the request in time"),
    "BadDigest": (UnavailableError, "the bytes were damaged on their way"),
    "XAmzContentSHA256Mismatch": (UnavailableError, "the bytes were damaged on their way"),
    "InvalidRange": (CorruptDataError, "it is damaged: it ends before the range"),
    "NotImplemented": (InvalidInputError, "the server lacks this operation; use one that has conditional PUT"),
    "400": (InvalidInputError, "the server refused the request"),
    "403": (UnavailableError, "access denied; grant GetObject, PutObject, DeleteObject and ListBucket"),
    "404": (NotFoundError, "the object does not exist"),
    "408": (UnavailableError, "the store did not get the request in time"),
    "409": (UnavailableError, "another request on the same key is being served"),
    "412": (UnavailableError, "the object changed meanwhile"),
    "416": (CorruptDataError, "it is damaged: it ends before the range"),
    "429": (UnavailableError, "the store asks to slow down"),
    "501": (InvalidInputError, "the server lacks this operation; use one that has conditional PUT"),
    "3xx": (UnavailableError, "the server redirected the request; check endpoint and region"),
    "4xx": (InvalidInputError, "the server refused the request"),
    "5xx": (UnavailableError, "the store failed"),
}
"""Error code of the server, or HTTP status as text if it sends no code: class and advice."""


def meaning(verb: str, code: str, status: str) -> tuple[type[DstlError], str]:
    """
    Return the class of an error, and the advice for it.

    Args:
        verb: What was tried.
        code: The server's code; empty, or the status, if it sends none.
        status: The HTTP status.
    """
    # Deletions rely on absence (I11): some servers answer 404 to an unknown user, too.
    if status == "404" and (code == status or code not in _ERRORS) and verb != LOOK_UP:
        return UnavailableError, FOREIGN if code in ("", status) else _UNHEARD_OF
    found = _ERRORS.get(code) or _ERRORS.get(status) or _ERRORS.get(f"{status[:1]}xx")
    return found or (InternalError, "unexpected answer of the server")


def is_redirected(error: Exception) -> bool:
    """Return whether a server redirects all requests, also that for the bucket's region by which botocore follows."""
    inner = getattr(error, "kwargs", {}).get("error", error)  # botocore's errors of connections have their cause there
    return isinstance(inner, RecursionError)
