"""
Ends a session whose server hangs.

A statement may take long, so a session waits for its answer without a limit, as long as the server's host acknowledges
what was sent. But the server may hang, or be gone behind a proxy that keeps the connection. A new session shows which
is the case. A pooler accepts a login itself, so the new session also sends a query.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg

_LOOK_EVERY_S = 60.0
_ANSWER_S = 150.0
"""A pooler that has no session left says so after two minutes (PgBouncer's `query_wait_timeout`): that is an answer."""


@contextmanager
def ended_if_silent(connection: psycopg.Connection, connect: Callable[[], psycopg.Connection]) -> Iterator[None]:
    """
    While the block runs, end its session if the server does not answer a new one either; the block then fails.

    Args:
        connection: The session.
        connect: Opens another one; raises `psycopg.errors.ConnectionTimeout` if there is no answer.
    """
    own, done = _descriptor(connection), threading.Event()

    def watch() -> None:
        with own:
            while not done.wait(_LOOK_EVERY_S):
                if _is_silent(connect) and not done.is_set():
                    _shut(own)
                    return

    threading.Thread(target=watch, name="dstl-postgres-watch", daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def ended_without_answer(connection: psycopg.Connection) -> Iterator[threading.Event]:
    """While the block runs, end its session if it gets no answer for too long; the block fails, the event is set."""
    own, is_ended = _descriptor(connection), threading.Event()

    def end() -> None:
        is_ended.set()
        _shut(own)

    timer = threading.Timer(_ANSWER_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield is_ended
    finally:
        timer.cancel()
        timer.join()
        own.close()


def _is_silent(connect: Callable[[], psycopg.Connection]) -> bool:
    is_ended = threading.Event()
    try:
        with connect() as connection, ended_without_answer(connection) as is_ended:
            connection.execute("select")
    except psycopg.errors.ConnectionTimeout:
        return True
    except psycopg.Error:
        return is_ended.is_set()  # otherwise it answers, if only that it has no room
    return False


def _descriptor(connection: psycopg.Connection) -> socket.socket:
    """Return a duplicate: the session's own may be closed, and its number reused, while a check takes time."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _shut(own: socket.socket) -> None:
    with suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
