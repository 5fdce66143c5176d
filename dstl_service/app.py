"""
Builds the ASGI application: routes, error handlers, middleware, start and stop.

FastAPI is imported only here and in ``http``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.lowlevel
from fastapi import FastAPI

from dstl_service import __version__
from dstl_service.access.audit import AuditTrail
from dstl_service.access.certificates import client_context
from dstl_service.access.tokens import Access
from dstl_service.composition import compose
from dstl_service.http.access_middleware import AccessMiddleware
from dstl_service.http.acts import RecordWriter
from dstl_service.http.connections import connections_within
from dstl_service.http.errors import RESPONSES, install
from dstl_service.http.job_limits import AnswerRoom, BodyRoom, RequestPlaces
from dstl_service.http.routes import appends, checkpoints, forks, jobs, links, materializations, restore, savepoints
from dstl_service.http.routes.description import describe_access
from dstl_service.http.routes.fast_path import FastPath
from dstl_service.http.shutdown import ShutdownMiddleware
from dstl_service.peers.client import PeerClient
from dstl_service.process.idle import IdleWatch
from dstl_service.process.logs import LogLimiter, log_limiters
from dstl_service.process.program import ProgramWatch
from dstl_service.settings import ServiceSettings
from storage.clock import Clock, IdSource, SystemClock, SystemIds
from storage.object_store import ObjectStore
from storage.open import open_store


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
        store: Replaces the store that `settings.storage` names; closed with the application.
        clock: The only source of time.
        ids: The only source of unique names.
    """
    clock = clock or SystemClock()
    access = Access(settings.token, settings.token_file, clock, settings.access_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.settings = settings
        app.state.overloads, app.state.mistakes, app.state.excesses = (LogLimiter(clock) for _ in range(3))
        app.state.refusals = log_limiters(clock)
        opened = store or open_store(settings.storage, **settings.store_options())
        unique = ids or SystemIds()
        record = app.state.record = RecordWriter(AuditTrail(opened, clock, unique))
        parts = app.state.parts = compose(
            settings,
            opened,
            clock,
            unique,
            PeerClient(access.own, settings.peer_timeout_s, client_context(settings.tls, clock)),
        )
        parts.announcement.begin()

        def stop_process() -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        idle = app.state.idle = IdleWatch(
            settings.idle_exit_s, stop_process, lambda: parts.is_busy, lambda: parts.jobs.is_any_reached
        )
        idle.start()
        program = ProgramWatch(stop_process, lambda: idle.is_in_use)
        if settings.idle_exit_s > 0:  # another one is its operator's to stop
            program.start()
        await anyio.lowlevel.checkpoint()  # loads what it needs of the event loop; the first restore would wait 40 ms
        try:
            yield
        finally:
            idle.stop()
            program.stop()
            record.close()
            await parts.close()

    app = FastAPI(
        title="DSTL state changelog service",
        version=__version__,
        description="Batches the state changelogs of all tasks of a host into shared objects and keeps checkpoints.",
        lifespan=lifespan,
        responses=RESPONSES,
        # These pages run scripts of another host's, which could read every GET of a service without a token.
        docs_url=None,
        redoc_url=None,
        # It would look for exporters with each request, and send what is in queries and errors to them; see `metrics`.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    for routes in (jobs, appends, links, checkpoints, restore, materializations, savepoints, forks):
        app.include_router(routes.router)

    install(app)
    describe_access(app)
    app.add_middleware(FastPath)
    app.add_middleware(AnswerRoom)
    app.add_middleware(BodyRoom, bytes_max=settings.http.bodies_bytes_max)
    app.add_middleware(RequestPlaces, connections_max=connections_within(settings.http.connections_max))
    app.add_middleware(AccessMiddleware, access=access, hosts=settings.known_hosts)
    app.add_middleware(ShutdownMiddleware)  # added last, so it is the outermost
    return app
