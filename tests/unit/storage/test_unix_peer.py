"""The kernel reports the peer of a Unix socket."""

from __future__ import annotations

import os
import socket

from storage.unix_peer import peer_uid


def test_user_of_the_peer_is_reported() -> None:
    """The user is that of the peer process, and the socket stays open."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_uid(one.fileno()) == os.geteuid()
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_tcp_peer_has_no_user() -> None:
    """Over TCP the peer's user is unknown."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert peer_uid(server.fileno()) is None
