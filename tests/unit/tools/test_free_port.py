"""Ports for test servers: free, and outside the range that the system assigns to connections."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from tools.servers import programs
from tools.servers.programs import free_port


@pytest.fixture
def ports_of_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the range of ports that the system assigns to connections."""
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(programs, "_CONNECTIONS_PORTS", file)
    return file


def test_port_is_not_assigned_to_a_connection(ports_of_connections: Path) -> None:
    """A server that stops for a while finds its port free again, whatever connections were opened meanwhile."""
    assert all(1024 < free_port() < 32_768 for _ in range(50))


def test_processes_with_one_seed_take_different_ports(ports_of_connections: Path) -> None:
    """Concurrent test processes start with one seed and still do not all try the same port."""
    found = set()
    for _ in range(5):
        random.seed(1)
        found.add(free_port())

    assert len(found) > 1


def test_port_is_found_if_connections_may_use_all(ports_of_connections: Path) -> None:
    """If the system assigns all ports to connections, or the range is unknown, a port is still found."""
    ports_of_connections.write_text("1024\t65535\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
    ports_of_connections.unlink()
    assert free_port()
