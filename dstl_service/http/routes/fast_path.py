"""
Fast path for the two requests of every task: append and restore.

Each task of each batch sends both, and FastAPI takes longer to check their parameters than the service takes for the
rest. A request that cannot be parsed here is passed to the routes of `appends` and `restore`, which say what is wrong
with it; both ways have one parser and one handler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service.http.errors import error_response, log_refusal
from dstl_service.http.requests import take_in
from dstl_service.http.routes.restore import answer_restore
from dstl_service.http.task_requests import AppendRequest, RestoreRequest
from dstl_service.wire import NAME
from storage.errors import DstlError, InvalidInputError

_PATH = re.compile(rf"/v1/jobs/({NAME})/(change-sets|restore)")


class FastPath:
    """ASGI middleware that answers appends and restores, and passes on all other requests and malformed ones."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _parse(scope, receive)
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer()
        except DstlError as error:
            log_refusal(scope, error)
            response = error_response(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)


def _parse(scope: Scope, receive: Receive) -> Callable[[], Coroutine[Any, Any, Response]] | None:
    """Return what answers a request; None if it is another one, or malformed."""
    if scope["type"] != "http":
        return None
    path = _PATH.fullmatch(scope["path"])
    if path is None:
        return None
    try:
        match scope["method"], path[2]:
            case "POST", "change-sets":
                return _append(AppendRequest.parse(path[1], scope["query_string"]), scope, receive)
            case "GET", "restore":
                return _restore(path[1], RestoreRequest.parse(scope["query_string"]), scope)
    except InvalidInputError:
        pass
    return None


def _append(request: AppendRequest, scope: Scope, receive: Receive) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def answer() -> Response:
        ref = await take_in(scope["app"].state.parts.intake, scope, receive, request)
        return Response(ref.to_json(), media_type="application/json")

    return answer


def _restore(job: str, request: RestoreRequest, scope: Scope) -> Callable[[], Coroutine[Any, Any, Response]]:
    return lambda: answer_restore(scope["app"].state.parts, job, request)
