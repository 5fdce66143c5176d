"""
What every request passes before a route sees it: who it comes from, what that one may, and how large it may be.

A plain ASGI middleware: it is on the way of every change set, whose body must be streamed through untouched.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.access.rights import OPEN_PATHS, Identity
from dstl_service.access.tokens import CALLER, Access
from dstl_service.http.errors import CLOSE, NotAllowedError, error_response, log_refusal
from dstl_service.http.web_pages import refusal
from dstl_service.wire import JSON_BYTES_MAX, NAME
from storage.errors import InvalidInputError, UnauthorizedError

IDENTITY = "dstl.identity"
"""Where a request's scope has who it comes from."""

_STREAMED = re.compile(rf"/v1/jobs/{NAME}/change-sets")
"""Path of the route that takes its body, by POST, as a stream and limits it itself; see `appends.append`."""

_TOO_LARGE = f"the body of a request has at most {JSON_BYTES_MAX} bytes here"


class AccessMiddleware:
    """
    Lets a request in if it may be and is not too large, and tells the idle watch of it.

    Args:
        app: What lies behind.
        access: Knows who asks.
        hosts: See `web_pages.refusal`.
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
        if scope["path"] not in OPEN_PATHS:
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
        """Return the answer to a request that is not let in, and put who it comes from into the scope of others."""
        page = refusal(
            scope["method"], headers.get(b"host"), headers.get(b"origin"), headers.get(b"content-type"), self._hosts
        )
        if page is not None:
            status, error = page
            return error_response(error, status, CLOSE)
        if "\n" in scope["path"]:  # routes take one that ends so for another path, which the record does not know then
            return error_response(InvalidInputError("a path here has no line break"), 400, CLOSE)
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
        # The parser holds a body to the length that was stated.
        is_small = length is not None and length <= JSON_BYTES_MAX
        if is_small or scope["method"] == "GET" or is_streamed(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
        elif length is not None:
            await error_response(InvalidInputError(_TOO_LARGE), 413, CLOSE)(scope, receive, send)
        else:
            await self._app(scope, _counted(receive), send)


def _without_right(identity: Identity, scope: Scope) -> Response:
    error = NotAllowedError(
        f"{identity.name} has the role {identity.role} for {', '.join(identity.jobs)}, which does not allow "
        f"{scope['method']} {scope['path'][:300]}: let the access file say otherwise, or use another token"
    )
    log_refusal(scope, error)
    return error_response(error, headers=CLOSE)


def is_streamed(method: str, path: str) -> bool:
    """Say whether a request is one whose body its route takes as a stream."""
    return method == "POST" and _STREAMED.fullmatch(path) is not None


def _counted(receive: Receive) -> Receive:
    """Pass a body of unknown length on, until it is too long."""
    received_bytes = 0

    async def receive_counted() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > JSON_BYTES_MAX:
            raise HTTPException(413, _TOO_LARGE, CLOSE)
        return message

    return receive_counted
