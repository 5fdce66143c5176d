"""How the service's sockets are set up."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstl_service.http.listening import open_listener
from storage.errors import InvalidInputError
from storage.private_folder import Trust, UntrustedFolderError


def test_connections_over_tcp_are_kept_alive() -> None:
    """A client whose host is gone does not leave its connection open for ever."""
    with open_listener() as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as accepted:
            kept_alive = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)

    assert kept_alive
    assert idle_s == 60


def test_port_that_cannot_be_is_an_error_that_says_so() -> None:
    """A wrong port number is reported as the operator's mistake, without a traceback."""
    with pytest.raises(InvalidInputError, match=r"cannot listen on 127\.0\.0\.1:99999: .*port must be 0-65535"):
        open_listener(port=99999)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="dl") as name:
        yield Path(name)


@pytest.mark.parametrize(("users", "mode"), [("", 0o600), ("7", 0o666)])
def test_socket_has_its_mode_whatever_the_umask(users: str, mode: int, folder: Path) -> None:
    """The socket is accessible to this user only; if others are named, each connection is checked instead."""
    before = os.umask(0)
    try:
        open_listener(socket_path=folder / "s", trust=Trust.parse(users, "")).close()
    finally:
        os.umask(before)

    assert (folder / "s").stat().st_mode & 0o777 == mode


def test_socket_is_not_put_where_others_can_write(folder: Path) -> None:
    """In a folder that others can write, another user could replace the socket; the operator may vouch for it."""
    folder.chmod(0o777)
    with pytest.raises(UntrustedFolderError, match="is writable by other users"):
        open_listener(socket_path=folder / "s")
    assert list(folder.iterdir()) == []

    open_listener(socket_path=folder / "s", trust=Trust.parse("", str(folder))).close()


def test_lock_that_is_a_link_is_not_opened(folder: Path) -> None:
    """The target of a link planted in the lock's place is not emptied."""
    (folder / "target").write_text("precious", encoding="utf-8")
    (folder / "s.lock").symlink_to(folder / "target")

    with pytest.raises(InvalidInputError, match="cannot listen"):
        open_listener(socket_path=folder / "s")
    assert (folder / "target").read_text(encoding="utf-8") == "precious"
