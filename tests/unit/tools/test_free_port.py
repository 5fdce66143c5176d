"""Ports for servers of tests: free, and none that a connection may be given before the server listens on it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from tools.servers import programs
from tools.servers.programs import free_port


@pytest.fixture
def ports_of_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that says which ports connections are given."""
    file = tmp_path / "ip_local_port_range"
    file.write_text("32768\t60999\n")
    monkeypatch.setattr(programs, "_CONNECTIONS_PORTS", file)
    return file


def test_port_is_given_to_no_connection(ports_of_connections: Path) -> None:
    """A server that stops for a while finds its port free again, whatever has connected to somewhere meanwhile."""
    assert all(1024 < free_port() < 32_768 for _ in range(50))


def test_processes_with_one_seed_take_different_ports(ports_of_connections: Path) -> None:
    """Tests that run at the same time in several processes begin with one seed, and do not all try one port."""
    found = set()
    for _ in range(5):
        random.seed(1)
        found.add(free_port())

    assert len(found) > 1


def test_system_that_leaves_no_ports_has_some(ports_of_connections: Path) -> None:
    """Where connections are given all ports, or nobody says which, a port is found all the same."""
    ports_of_connections.write_text("1024\t65535\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
    ports_of_connections.unlink()
    assert free_port()
