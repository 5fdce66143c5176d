"""
Checks of every request before its route: identity, rights and size.

A plain ASGI middleware: every change set passes it, and its body must stream through untouched.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.access.rights import PUBLIC_PATHS, Identity
from dstl_service.access.tokens import CALLER, Access
from dstl_service.http.errors import CLOSE, NotAllowedError, error_response, log_refusal
from dstl_service.http.web_pages import refusal
from dstl_service.wire import JSON_BYTES_MAX, JSON_VALUES_MAX, NAME
from storage.errors import InvalidInputError, UnauthorizedError

IDENTITY = "dstl.identity"
"""Key of the caller's `Identity` in a request's scope."""

VALUES = "dstl.values"
"""Key of the number of values in a body, as far as it has arrived, in a request's scope."""

_STREAMED = re.compile(rf"/v1/jobs/{NAME}/change-sets")
"""Path of the one route, by POST, that streams its body and limits it itself; see `appends.append`."""

_JOB = re.compile(rf"/v1/jobs/({NAME})(?:/|$)")

_TOO_LARGE = f"the body of this request may have at most {JSON_BYTES_MAX} bytes"
_TOO_MANY = f"the body of this request may have at most {JSON_VALUES_MAX} values"
_BEFORE_VALUES = b",[{"


class AccessMiddleware:
    """
    Passes a request on if its caller may send it and it is not too large, and tells the idle watch.

    Args:
        app: The next application.
        access: Identifies callers.
        hosts: Accepted host names, see `web_pages.refusal`.
    """

    def __init__(self, app: ASGIApp, access: Access, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._access = access
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        length = headers.get(b"content-length")
        if scope["path"] not in PUBLIC_PATHS:
            refused = self._refused(scope, headers)
            if refused is not None:
                await refused(scope, receive, send)
                return
        idle = scope["app"].state.idle
        idle.request_began()
        try:
            await self._let_in(scope, receive, send, None if length is None else int(length))
        finally:
            idle.request_ended()

    def _refused(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        """Return the answer to a refused request; else None, with the caller's identity in the scope."""
        page = refusal(
            scope["method"],
            headers.get(b"host"),
            headers.get(b"origin"),
            headers.get(b"content-type"),
            self._hosts,
            headers.get(b"sec-fetch-site"),
        )
        if page is not None:
            status, error = page
            return error_response(error, status, CLOSE)
        if "\n" in scope["path"]:  # routes ignore a final line break, the table of rights does not
            return error_response(InvalidInputError("the path must not contain a line break"), 400, CLOSE)
        identity = self._access.identify(headers.get(b"authorization"), scope.get(CALLER))
        if identity is None:
            self._access.log_refusal((scope.get("client") or ("",))[0], scope["path"])
            unknown = UnauthorizedError("a valid token is needed")
            return error_response(unknown, 401, {"www-authenticate": "Bearer", **CLOSE})
        if not identity.may(scope["method"], scope["path"]):
            return _without_right(identity, scope)
        scope[IDENTITY] = identity
        return None

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, length: int | None) -> None:
        if scope["method"] == "GET" or is_streamed(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
        elif length is not None and length > JSON_BYTES_MAX:
            await error_response(InvalidInputError(_TOO_LARGE), 413, CLOSE)(scope, receive, send)
        else:
            await self._app(scope, _counted(scope, receive), send)


def _without_right(identity: Identity, scope: Scope) -> Response:
    error = NotAllowedError(
        f"{identity.name} has the role {identity.role} for {', '.join(identity.jobs)}, which does not allow "
        f"{scope['method']} {scope['path'][:300]}; grant the right in the access file, or use another token"
    )
    log_refusal(scope, error)
    return error_response(error, headers=CLOSE)


def is_streamed(method: str, path: str) -> bool:
    """Say whether a request's route streams its body."""
    return method == "POST" and _STREAMED.fullmatch(path) is not None


def job_of(path: str) -> str:
    """Return the job that a path names, or an empty text."""
    found = _JOB.match(path)
    return found[1] if found else ""


def _counted(scope: Scope, receive: Receive) -> Receive:
    """Pass on a body; refuse it when its bytes or values exceed a limit, before it is parsed."""
    received_bytes = 0

    async def receive_counted() -> Message:
        nonlocal received_bytes
        message = await receive()
        body = message.get("body", b"")
        received_bytes += len(body)
        scope[VALUES] = values = scope.get(VALUES, 0) + len(body) - len(body.translate(None, _BEFORE_VALUES))
        if received_bytes > JSON_BYTES_MAX:
            raise HTTPException(413, _TOO_LARGE, CLOSE)
        if values > JSON_VALUES_MAX:
            raise HTTPException(413, _TOO_MANY, CLOSE)
        return message

    return receive_counted
