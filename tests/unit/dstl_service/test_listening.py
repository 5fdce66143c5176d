"""How the service's sockets are set up."""

from __future__ import annotations

import socket

from dstl_service.listening import open_listener
from dstl_service.settings import ServiceSettings


def test_connections_over_tcp_are_kept_alive() -> None:
    """A client whose host is gone does not leave its connection open for ever."""
    with open_listener(ServiceSettings("memory://x")) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as accepted:
            kept_alive = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    assert kept_alive
    assert idle_s == 60
