"""
TCP connections whose other end vanished without a word, as a host does that loses its power.

The kernel asks now and then whether it is there, and gives the connection up without a sign of it.
"""

from __future__ import annotations

import socket


def keep_alive(
    connection: socket.socket, after_s: int, every_s: int, probes: int, *, unread_s: int | None = None
) -> None:
    """
    Have a connection given up when its other end is gone; those that a listener accepts inherit it.

    Args:
        connection: A TCP socket.
        after_s: How long it is silent before the other end is asked.
        every_s: How long each question waits for its answer.
        probes: How many questions are asked.
        unread_s: How long what was sent may wait to be taken; None where the other end may be slow to read.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {
        "TCP_KEEPIDLE": after_s,
        "TCP_KEEPINTVL": every_s,
        "TCP_KEEPCNT": probes,
        **({} if unread_s is None else {"TCP_USER_TIMEOUT": 1000 * unread_s}),
    }
    for name, value in times.items():
        if hasattr(socket, name):  # else the system's own times hold
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
