"""
A worker's connection to Spark, which is to transfer small inputs without delay.

Spark sends a task's function and then its rows over a TCP connection within the host, without ``TCP_NODELAY``: rows
that do not fill a segment leave only when the function is acknowledged. The worker's kernel delays that by 40 ms, in
the hope of an answer to send along; but the answer needs the rows. With ``TCP_QUICKACK`` the kernel acknowledges at
once, until the worker sends something. Over a Unix socket (``spark.python.unix.domain.socket.enabled``) there is no
delay.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import TypeVar

_T = TypeVar("_T")

_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Only Linux has it."""
_DESCRIPTORS = range(3, 64)
_LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def without_delay(batches: Iterable[_T]) -> Iterator[_T]:
    """Return an iterator over a task's input, which Spark sends at once from now on; any input may be given."""
    connection = connection_to_spark()
    if connection is None:
        return iter(batches)
    acknowledge(connection)
    return _acknowledged(batches, connection)


def _acknowledged(batches: Iterable[_T], connection: socket.socket) -> Iterator[_T]:
    for batch in batches:
        yield batch
        acknowledge(connection)  # the kernel delays again when output was sent meanwhile
    acknowledge(connection)


def acknowledge(connection: socket.socket) -> None:
    """Acknowledge what has come, and whatever comes next as soon as it is read, until something is sent."""
    if _QUICKACK is not None:
        with suppress(OSError):  # it only costs time
            connection.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)


@cache
def connection_to_spark() -> socket.socket | None:
    """Return this worker's TCP connection to Spark, which lasts as long as the process; None if there is none."""
    return first_connection(_DESCRIPTORS)


def first_connection(descriptors: Iterable[int]) -> socket.socket | None:
    """
    Return the first TCP connection within the host among these descriptors, as a duplicate, without delays of its own.

    A worker inherits its connection to Spark, so all others come after it.
    """
    for number in descriptors:
        with suppress(OSError):  # nothing, or not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[0] in _LOOPBACK:
                        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return found.dup()
    return None
