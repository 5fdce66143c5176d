"""HTTP form of errors: one table of statuses and one body, described for every route."""

from __future__ import annotations

import logging
import re
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.types import Scope

from dstl_service.process.logs import LogLimiter
from dstl_service.wire import NAME, ErrorBody
from storage.errors import (
    DstlError,
    ErrorKind,
    InternalError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    UnauthorizedError,
    UnavailableError,
)

HTTP_STATUS = {
    ErrorKind.INVALID_INPUT: 400,
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409,
    ErrorKind.FENCED: 409,
    ErrorKind.LOST_CHANGES: 410,
    ErrorKind.CORRUPT_DATA: 422,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.INTERNAL: 500,
    ErrorKind.UNAVAILABLE: 503,
    ErrorKind.CLOSED: 503,
}

_DESCRIPTIONS = {
    400: "The request is wrong; correct it.",
    401: "A valid token is needed: `Authorization: Bearer …`.",
    403: "The token or certificate does not give this right, or the request looks like a web page's.",
    404: "There is no such job, checkpoint or path.",
    405: "The path has no such method.",
    409: "Another request was first, or a newer epoch has begun.",
    410: "A change set is gone; execute the batch again.",
    413: "The body is too large.",
    415: "The body has a type that only web pages send; send `application/json`.",
    422: "Stored bytes are damaged; the message names the object.",
    429: "Too much is in flight; ask again after `Retry-After` seconds.",
    500: "A bug of this service.",
    503: "The storage or a peer is unavailable, or the body stopped; ask again after `Retry-After` seconds.",
}

_BODY = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}

RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _BODY} for status, text in _DESCRIPTIONS.items()
}
"""
Answers that any route may give in addition to its own, for the OpenAPI document.

The body is a reference, for FastAPI would make a model for each status of each route: half of the time of the first
request that a service answers. One route names the model itself: `WITH_MODEL`.
"""

WITH_MODEL: dict[int | str, dict[str, Any]] = {500: {"description": _DESCRIPTIONS[500], "model": ErrorBody}}

CLOSE = {"connection": "close"}
"""Header of an answer that is sent before the whole request was read."""

_PLACE = re.compile(r"\{[^}]*\}")

_NUMBERS = ("checkpoint_id", "epoch", "attempt", "partition", "sqn")
_JOB_PATH = re.compile(rf"/v1/jobs/({NAME})(?:/checkpoints/([0-9]{{1,16}}))?(?:/|$)")
_NUMBER = re.compile(r"[0-9]{1,16}")
_SHOWN_CHARS_MAX = 500
_SHOWN_ERRORS_MAX = 10
_CALLERS_FAULT = frozenset({ErrorKind.INVALID_INPUT, ErrorKind.NOT_FOUND})

logger = logging.getLogger("dstl_service")


class NotAllowedError(UnauthorizedError):
    """The caller is known but lacks the right. Use another token, or grant the right in the access file."""


class BodyTimeoutError(UnavailableError):
    """The rest of a request's body did not arrive in time. The connection is closed; send the request again."""


def install(app: FastAPI) -> None:
    """Register handlers that answer every error with an `ErrorBody`."""

    @app.exception_handler(DstlError)
    async def report(request: Request, error: DstlError) -> JSONResponse:
        log_refusal(request.scope, error)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def report_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        wrong = error.errors()
        text = "; ".join(_shown(item) for item in wrong[:_SHOWN_ERRORS_MAX])
        more = len(wrong) - _SHOWN_ERRORS_MAX
        text += f"; and {more} more" if more > 0 else ""
        return error_response(InvalidInputError(f"the request is invalid: {text}"))

    @app.exception_handler(HTTPException)
    async def report_http(request: Request, error: HTTPException) -> JSONResponse:
        error_class = {404: NotFoundError, 429: OverloadedError}.get(error.status_code, InvalidInputError)
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers = {"allow": ", ".join(_methods(request))}
        return error_response(error_class(message), error.status_code, headers)

    @app.exception_handler(Exception)
    async def report_bug(request: Request, error: Exception) -> JSONResponse:
        logger.error("request failed", extra={"path": request.url.path}, exc_info=error)
        return error_response(InternalError(f"the service failed: {type(error).__name__}; see its log"))


def _shown(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    return f"{place[:_SHOWN_CHARS_MAX]}: {item['msg'][:_SHOWN_CHARS_MAX]}"


def log_refusal(scope: Scope, error: DstlError) -> None:
    """
    Log a refused request with the job, checkpoint, epoch and attempt that it names.

    Back-pressure is logged at most once a second, for the latest refused request, with the number of requests since
    the line before; so are requests that are invalid or name something missing, those beyond the caller's rights, and
    each other kind of refusal of each job. Text chosen by the request is cut to a limited length.
    """
    path = _JOB_PATH.match(scope["path"])
    requests = _limiter_of(error, scope["app"].state, path[1] if path is not None else "").count()
    if not requests:
        return
    asked = {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    fields: dict[str, object] = {name: int(asked[name]) for name in _NUMBERS if _NUMBER.fullmatch(asked.get(name, ""))}
    if path is not None:
        fields |= {"job": path[1]} | ({"checkpoint_id": int(path[2])} if path[2] else {})
    fields |= {name: value for name, value in error.context.items() if name in ("job", *_NUMBERS)}
    shown = {"path": scope["path"][:_SHOWN_CHARS_MAX], "error": str(error)[:_SHOWN_CHARS_MAX]}
    facts = {"method": scope["method"], "kind": error.kind.value, **shown}
    level = logging.INFO if error.kind in _CALLERS_FAULT else logging.WARNING
    logger.log(level, "request refused", extra={**fields, **facts, "requests": requests})


def _limiter_of(error: DstlError, state: State, job: str) -> LogLimiter:
    """Return what limits the lines of such errors: a caller can cause them at any rate."""
    limiter: LogLimiter
    if isinstance(error, NotAllowedError):
        limiter = state.excesses
    elif error.kind is ErrorKind.OVERLOADED:
        limiter = state.overloads
    elif error.kind in _CALLERS_FAULT:
        limiter = state.mistakes
    else:
        limiter = state.refusals(job, error.kind.value)
    return limiter


def _methods(request: Request) -> list[str]:
    """Return all methods of a path; Starlette reports only those of the first matching route."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (item for path, item in paths.items() if re.fullmatch(_PLACE.sub("[^/]+", path), request.url.path))
    return sorted({method.upper() for item in matching for method in item})


def error_response(error: DstlError, status: int | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the answer that reports an error; `status` overrides the status of the error's kind."""
    if status is None:
        status = 403 if isinstance(error, NotAllowedError) else HTTP_STATUS[error.kind]
    if isinstance(error, BodyTimeoutError):
        headers = {**(headers or {}), **CLOSE}
    if status in (429, 503):
        headers = {**(headers or {}), "retry-after": "1"}
    return JSONResponse(error.to_dict(), status, headers)
