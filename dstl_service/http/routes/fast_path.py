"""
Fast path for the two requests of every task: append and restore.

Each task of each batch sends both, and FastAPI takes longer to check their parameters than the service takes for the
rest. So this middleware answers them all, malformed ones too; FastAPI only describes them.
"""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service.http.errors import error_response, log_refusal
from dstl_service.http.routes.appends import answer_append
from dstl_service.http.routes.restore import answer_restore
from dstl_service.http.task_requests import AppendRequest, RestoreRequest
from storage.errors import DstlError

_PATH = re.compile(r"/v1/jobs/([^/]+)/(change-sets|restore)")
_METHODS = {"change-sets": "POST", "restore": "GET"}


class FastPath:
    """ASGI middleware that answers appends and restores, and passes on all other requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if path is None or scope["method"] != _METHODS[path[2]]:
            await self._app(scope, receive, send)
            return
        try:
            response = await _answer(path[1], path[2], scope, receive)
        except DstlError as error:
            log_refusal(scope, error)
            response = error_response(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)


async def _answer(job: str, what: str, scope: Scope, receive: Receive) -> Response:
    parts, query = scope["app"].state.parts, scope["query_string"]
    if what == "change-sets":
        return await answer_append(parts, AppendRequest.parse(job, query), scope, receive)
    return await answer_restore(parts, RestoreRequest.parse(job, query))
