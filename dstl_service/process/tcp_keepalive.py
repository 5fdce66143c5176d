"""
TCP keep-alive: detects peers that vanished without closing, as a host does that loses power.

The kernel probes a silent connection, and drops it if no probe is answered.
"""

from __future__ import annotations

import socket


def keep_alive(
    connection: socket.socket, after_s: int, every_s: int, probes: int, *, unread_s: int | None = None
) -> None:
    """
    Enable keep-alive on a socket; connections that a listener accepts inherit it.

    Args:
        connection: A TCP socket.
        after_s: Silence before the first probe, in seconds.
        every_s: Seconds between probes.
        probes: Number of unanswered probes after which the connection is dropped.
        unread_s: Longest time for which sent data may stay unacknowledged; None where the peer may read slowly.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {
        "TCP_KEEPIDLE": after_s,
        "TCP_KEEPINTVL": every_s,
        "TCP_KEEPCNT": probes,
        **({} if unread_s is None else {"TCP_USER_TIMEOUT": 1000 * unread_s}),
    }
    for name, value in times.items():
        if hasattr(socket, name):  # otherwise the system's defaults apply
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
