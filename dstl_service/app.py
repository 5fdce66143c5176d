"""
Wires the service into an ASGI application: routes, errors to HTTP statuses, the token, opening and closing.

The only module besides ``routes`` that knows FastAPI.
"""

from __future__ import annotations

import hmac
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dstl_service import __version__
from dstl_service.idle import IdleWatch
from dstl_service.peers import PeerClient
from dstl_service.routes import appends, checkpoints, jobs, restore, savepoints
from dstl_service.routes.append_shortcut import AppendShortcut
from dstl_service.routes.common import error_response
from dstl_service.service import ChangelogService
from dstl_service.settings import ServiceSettings
from dstl_service.shutdown import AnswerBeforeEnd
from storage.clock import Clock, IdSource, SystemClock, SystemIds
from storage.errors import DstlError, InvalidInputError
from storage.object_store import ObjectStore
from storage.open import open_store

_OPEN_PATHS = frozenset({"/health"})


class _Gate:
    """
    Lets a request in if it carries the token, and tells the idle watch of it.

    A plain ASGI middleware: it is on the way of every change set, whose body must be streamed through untouched.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._expected is not None and scope["path"] not in _OPEN_PATHS:
                given = dict(scope["headers"]).get(b"authorization", b"")
                if not hmac.compare_digest(given, self._expected):
                    refusal = JSONResponse({"kind": "unauthorized", "message": "a valid token is needed"}, 401)
                    await refusal(scope, receive, send)
                    return
            scope["app"].state.idle.touch()
        await self._app(scope, receive, send)


def create_app(
    settings: ServiceSettings,
    store: ObjectStore | None = None,
    clock: Clock | None = None,
    ids: IdSource | None = None,
) -> FastAPI:
    """
    Build the application.

    Args:
        settings: Checked settings.
        store: Taken instead of the one that `settings.storage` names; closed with the application.
        clock: The only source of time.
        ids: The only source of unique names.
    """
    token = settings.token()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.settings = settings
        service = app.state.service = ChangelogService(
            settings,
            store or open_store(settings.storage),
            clock or SystemClock(),
            ids or SystemIds(),
            PeerClient(token, settings.checkpoint_timeout_s),
        )
        idle = app.state.idle = IdleWatch(settings.idle_exit_s, lambda: os.kill(os.getpid(), signal.SIGTERM))
        idle.start()
        try:
            yield
        finally:
            idle.stop()
            await service.close()

    app = FastAPI(
        title="DSTL state changelog service",
        version=__version__,
        description="Batches the state changelogs of all tasks of a host into shared objects and keeps checkpoints.",
        lifespan=lifespan,
    )
    for router in (jobs.router, appends.router, checkpoints.router, restore.router, savepoints.router):
        app.include_router(router)

    app.add_middleware(AppendShortcut)
    app.add_middleware(_Gate, token=token)
    app.add_middleware(AnswerBeforeEnd)  # added last, it is met first

    @app.exception_handler(DstlError)
    async def report(_: Request, error: DstlError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def report_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        text = "; ".join(f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors())
        return error_response(InvalidInputError(f"the request is not valid: {text}"))

    return app
