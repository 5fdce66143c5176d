"""The command that runs the service."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from dataclasses import replace

import uvicorn

from dstl_service.access.callers import identified
from dstl_service.access.certificates import server_contexts
from dstl_service.app import create_app
from dstl_service.commands.common import settings_of
from dstl_service.composition import Parts
from dstl_service.http.connections import Connections, connections_within
from dstl_service.http.http_protocol import protocol_of
from dstl_service.http.listening import describe, open_listener
from dstl_service.http.shutdown import StoppingServer
from dstl_service.process.logs import LogLimiter, configure_logging
from dstl_service.process.memory import freeze_heap, reuse_freed_memory
from storage.clock import SystemClock
from storage.errors import InvalidInputError
from storage.open import open_store


def serve(options: argparse.Namespace) -> int:
    """Run the service until a signal stops it."""
    if options.socket_path is not None and (options.host is not None or options.port is not None):
        raise InvalidInputError("--host and --port are for TCP, but --socket listens on a Unix socket only; omit one")
    settings = settings_of(options)
    configure_logging(settings.log_level, settings.log_file, settings.log_file_bytes_max)
    reuse_freed_memory()
    app = create_app(settings, open_store(settings.storage, **settings.store_options()))
    freeze_heap()
    listener = open_listener(settings.socket_path, settings.host, settings.port, settings.trust)
    tls = settings.tls
    if settings.socket_path is None:
        sys.stdout.write(f"listening on {describe(listener, tls=tls.certificate_file is not None)}\n")
        sys.stdout.flush()
    bounds = replace(settings.http, connections_max=connections_within(settings.http.connections_max))
    guard = Connections(bounds, LogLimiter(SystemClock()))
    config = uvicorn.Config(
        app,
        http=identified(protocol_of(guard), settings.trust),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on a proxy's word about the client
        timeout_keep_alive=settings.http.idle_timeout_s,
        server_header=False,
    )
    contexts = None
    if tls.certificate_file is not None:
        contexts = server_contexts(tls, SystemClock())
        config.load()
        config.ssl = contexts()  # says that the scheme is https

    def begin_stop() -> None:
        parts: Parts = app.state.parts  # set when the application started
        parts.intake.begin_stop()

    server = StoppingServer(config, begin_stop, settings.shutdown_timeout_s, guard, contexts)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0
