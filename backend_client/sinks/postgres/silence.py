"""
Ends a session whose server hangs.

A statement may take long, so a session waits for its answer without a limit, as long as the server's host acknowledges
what was sent. But the server may hang, or be gone behind a proxy that keeps the connection. New sessions tell.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg

_LOOK_EVERY_S = 60.0


@contextmanager
def ended_if_silent(connection: psycopg.Connection, connect: Callable[[], psycopg.Connection]) -> Iterator[None]:
    """
    While the block runs, end its session if the server does not answer a new one either; the block then fails.

    Args:
        connection: The session.
        connect: Opens another one; raises `psycopg.errors.ConnectionTimeout` if there is no answer.
    """
    # A descriptor of its own: the session's may be closed, and its number used by others, while a look takes its time.
    own = socket.socket(fileno=os.dup(connection.fileno()))
    done = threading.Event()

    def watch() -> None:
        with own:
            while not done.wait(_LOOK_EVERY_S):
                try:
                    connect().close()
                except psycopg.errors.ConnectionTimeout:
                    if not done.is_set():
                        with suppress(OSError):
                            own.shutdown(socket.SHUT_RDWR)
                        return
                except psycopg.Error:
                    continue  # it answers, if only that it has no room

    threading.Thread(target=watch, name="dstl-postgres-watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()
