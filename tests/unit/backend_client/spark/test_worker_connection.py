"""A worker's connection to Spark."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from backend_client.spark.private import worker_connection
from backend_client.spark.private.worker_connection import first_connection, without_delay


@pytest.fixture
def worker() -> Iterator[socket.socket]:
    """Yield a worker's end of a connection whose kernel delays acknowledgements."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as end:
        spark, _ = server.accept()
        with spark:
            _delay(end)
            yield end


def _delay(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)


def _acknowledges_at_once(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))


def test_input_is_acknowledged_at_once(monkeypatch: pytest.MonkeyPatch, worker: socket.socket) -> None:
    """The kernel delays no acknowledgement, neither before the first batch nor after output was sent."""
    monkeypatch.setattr(worker_connection, "connection_to_spark", lambda: worker)
    assert not _acknowledges_at_once(worker)

    found, batches = list[int](), without_delay(range(3))
    assert _acknowledges_at_once(worker)
    for batch in batches:
        assert _acknowledges_at_once(worker)
        found.append(batch)
        _delay(worker)  # as sending does

    assert found == [0, 1, 2]
    assert _acknowledges_at_once(worker)


def test_broken_connection_fails_no_task(monkeypatch: pytest.MonkeyPatch, worker: socket.socket) -> None:
    """A connection without the option, or that is gone, leaves the input as it is; so does a worker without one."""
    worker.close()
    monkeypatch.setattr(worker_connection, "connection_to_spark", lambda: worker)
    assert list(without_delay(range(3))) == [0, 1, 2]

    monkeypatch.setattr(worker_connection, "connection_to_spark", lambda: None)
    assert list(without_delay(range(3))) == [0, 1, 2]


def test_first_connection_within_the_host_is_found(worker: socket.socket) -> None:
    """Files, pipes, Unix sockets, sockets that are not connected and closed descriptors are passed by; none is left."""
    read, write = os.pipe()
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull, "rb") as file:
        others = [read, write, left.fileno(), server.fileno(), file.fileno(), 9_999]
        before = set(os.listdir("/proc/self/fd"))
        assert first_connection(others) is None
        assert set(os.listdir("/proc/self/fd")) == before

        found = first_connection([*others, worker.fileno()])
    os.close(read)
    os.close(write)
    assert found is not None
    with found:
        assert found.getsockname() == worker.getsockname()
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
