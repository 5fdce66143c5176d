"""
What every request passes before a route sees it: the token, and the limit for bodies that are read as a whole.

A plain ASGI middleware: it is on the way of every change set, whose body must be streamed through untouched.
"""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstl_service.access import Tokens
from dstl_service.routes.errors import CLOSE, error_response
from dstl_service.wire import JSON_BYTES_MAX, NAME
from storage.errors import InvalidInputError, UnauthorizedError

OPEN_PATHS = frozenset({"/health"})
"""What may be asked without a token: only whether the process lives."""

_STREAMED = re.compile(rf"/v1/jobs/{NAME}/change-sets")
"""Path of the route that takes its body, by POST, as a stream and limits it itself; see `appends.append`."""

_TOO_LARGE = f"the body of a request has at most {JSON_BYTES_MAX} bytes here"


class Gate:
    """Lets a request in if it carries a token and is not too large, and tells the idle watch of it."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = length = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"content-length":
                length = value
        if scope["path"] not in OPEN_PATHS and not self._tokens.accept(authorization):
            self._tokens.log_refusal((scope.get("client") or ("",))[0], scope["path"])
            error = UnauthorizedError("a valid token is needed")
            await error_response(error, 401, {"www-authenticate": "Bearer", **CLOSE})(scope, receive, send)
            return
        idle = scope["app"].state.idle
        idle.request_began()
        try:
            await self._let_in(scope, receive, send, None if length is None else int(length))
        finally:
            idle.request_ended()

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, length: int | None) -> None:
        # The parser holds a body to the length that was stated.
        is_small = length is not None and length <= JSON_BYTES_MAX
        if is_small or scope["method"] == "GET" or is_streamed(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
        elif length is not None:
            await error_response(InvalidInputError(_TOO_LARGE), 413, CLOSE)(scope, receive, send)
        else:
            await self._app(scope, _counted(receive), send)


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
