"""Answers that are not the service's do not count as published."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow as pa
import pytest

from backend_client.sinks.protocol import Marker, Slot
from dstl_service.wire import CheckpointRef
from examples.http_sink import HttpSink
from storage.errors import FencedError, UnavailableError

SLOT = Slot("job", "uid", "out", 0)
OPENED = b'{"generation": 1, "key": null}'


class Answers(HTTPServer):
    """Opens slots, and answers records with one status."""

    status = 204


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_open = self.path.endswith("/open")
        self.send_response(200 if is_open else self.server.status)
        self.send_header("Location", "/page")
        self.end_headers()
        self.wfile.write(OPENED if is_open else b"")

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def service() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), _Handler) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (302, UnavailableError),  # of a proxy that wants somebody to log in; followed without the records
        (303, UnavailableError),
        (200, UnavailableError),  # an empty page
        (503, UnavailableError),
        (409, FencedError),
        (204, None),
    ],
)
def test_only_the_services_own_answer_counts(service: Answers, status: int, error: type[Exception] | None) -> None:
    """Records that a redirect, a proxy or a page has taken are not published."""
    service.status = status
    publisher = HttpSink(f"http://127.0.0.1:{service.server_port}").open(SLOT)
    marker, batch = Marker("uid", 0, CheckpointRef(0, 0, "m")), pa.record_batch({"n": [1]})
    if error is None:
        assert publisher.publish([batch], marker) == 1
        return
    with pytest.raises(error):
        publisher.publish([batch], marker)
    assert publisher.last_published() is None
