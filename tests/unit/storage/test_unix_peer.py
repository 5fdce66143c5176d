"""The kernel says who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket

from storage.unix_peer import peer_uid


def test_user_of_the_other_end_is_told() -> None:
    """The user is that of the process at the other end, and the socket stays open."""
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_uid(one.fileno()) == os.geteuid()
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_tcp_tells_no_user() -> None:
    """Over TCP nobody can tell."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert peer_uid(server.fileno()) is None
