"""
A real service process that is told to stop while it works.

A failure means that a stop silently drops received sets, leaves a request without an answer, or never ends.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from dstl_service.wire import NOTE_OPERATOR, ChangeSetRef
from storage.checksum import checksum64
from storage.errors import DstlError
from storage.key_groups import KeyGroupRange
from storage.model import ChangeSetId
from storage.open import open_store
from storage.segment_format import decode_object
from tests.waiting import wait_until
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GROUPS = KeyGroupRange(0, 127)
SLACK_S = 15  # the machine is shared; a real hang lasts half a minute and more
PATIENT = {"DSTL_UPLOAD_TIMEOUT_MS": "60000", "DSTL_SHUTDOWN_TIMEOUT_S": "30"}
STOP_S = 10  # a tenth of it is left between the last answer, the last line of the log, and the end
IMPATIENT = {**PATIENT, "DSTL_SHUTDOWN_TIMEOUT_S": str(STOP_S)}
Answer = tuple[int, Any]


class RawDriver:
    """A job's driver that sends raw requests, whose first answer counts."""

    def __init__(self, service: ServiceProcess) -> None:
        self.service = service
        self.client = ServiceClient(service.address, patience_s=60)
        self.job = JobDriver(self.client)
        self.threads = ThreadPoolExecutor(8)
        self.numbers = itertools.count()

    def append(self, payload: bytes = b"payload") -> ChangeSetRef:
        """Send a set with the next number."""
        return self.job.append(payload, next(self.numbers))

    def ask(self, path: str, body: Any) -> Future[Answer]:
        """Send a request, wait until it is received, and return a future of the status and document of its answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        connection = self.connect()
        connection.sendall(f"{head}expect: 100-continue\r\nconnection: close\r\n\r\n".encode())
        assert (taken := connection.recv(1 << 16)).startswith(b"HTTP/1.1 100"), taken  # it waits for the body
        connection.sendall(data)
        return self.threads.submit(lambda: answer_of(read_all(connection)))

    def persist(self, *refs: ChangeSetRef) -> Future[Answer]:
        """Request that sets are made durable."""
        return self.ask("/v1/jobs/job/persist", {"epoch": 1, "refs": [vars_of(ref) for ref in refs]})

    def complete(self, *refs: ChangeSetRef) -> Future[Answer]:
        """Request checkpoint 0."""
        return self.ask("/v1/jobs/job/checkpoints/0/complete", checkpoint_of(refs))

    def flush(self, *refs: ChangeSetRef) -> Future[Answer]:
        """Start the upload of all that `complete` will need, except the manifest."""
        return self.ask("/v1/jobs/job/checkpoints/0/flush", checkpoint_of(refs))

    def connect(self) -> socket.socket:
        """Open a connection."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(60)
        try:
            connection.connect(str(self.service.socket_path))
        except OSError:
            connection.close()
            raise
        return connection

    def is_refused(self) -> bool:
        """Return whether the service no longer accepts connections."""
        try:
            self.connect().close()
        except OSError:
            return True
        return False


def checkpoint_of(refs: tuple[ChangeSetRef, ...]) -> dict[str, Any]:
    """Return the request for a checkpoint of these sets."""
    return {"epoch": 1, "uid": "uid", "base": None, "refs": [vars_of(ref) for ref in refs], "operators": []}


def vars_of(ref: ChangeSetRef) -> dict[str, Any]:
    """Return a reference as JSON."""
    document: dict[str, Any] = json.loads(ref.to_json())
    return document


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answer_of(data: bytes) -> Answer:
    """Parse an answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), json.loads(body) if body else None


def stop(driver: RawDriver) -> float:
    """Tell the service to stop, wait until it has begun to, and return the time of the signal."""
    driver.client.close()
    os.kill(driver.service.pid, signal.SIGTERM)
    now = time.monotonic()
    wait_until(driver.is_refused)
    return now


def begin_two_uploads(driver: RawDriver, refs: list[ChangeSetRef]) -> list[Future[Answer]]:
    """Persist one set and, during its upload, complete a checkpoint that needs it and others."""
    persist = driver.persist(refs[0])
    wait_until(lambda: driver.service.metrics()["dstl_uploads_total"] == 1, what="the first upload")
    complete = driver.complete(*refs[:3])
    wait_until(lambda: driver.service.metrics()["dstl_uploads_total"] == 2, what="the second upload")
    return [persist, complete]


def stored_sets(storage: str) -> set[ChangeSetId]:
    """Return the identities of all stored sets of the job's operators."""
    store = open_store(storage)
    keys = [info.key for info in store.list("job/segments/")]
    stored = {entry.id for key in keys for entry, _ in decode_object(store.get(key), key)}
    return {set_id for set_id in stored if set_id.operator != NOTE_OPERATOR}


@contextmanager
def driver_of(storage: str, **environment: str) -> Iterator[RawDriver]:
    """Start a service and a driver."""
    with ServiceProcess(storage, environment) as service:
        driver = RawDriver(service)
        try:
            yield driver
        finally:
            driver.client.close()
            driver.threads.shutdown(wait=False)


@pytest.fixture
def folder() -> Iterator[str]:
    """Return the URL of a folder that is deleted after the test."""
    with tempfile.TemporaryDirectory(prefix="ds") as path:
        yield Path(path).as_uri()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Start an S3 server with a bucket; boto3 finds it through the environment."""
    with S3Server() as started:
        for name, value in started.env().items():
            monkeypatch.setenv(name, value)
        started.create_bucket("stop")
        yield started
        started.resume()


def test_stop_waits_for_slow_store(server: S3Server) -> None:
    """I5: received sets are uploaded although the store is slow, and waiting clients get their answers."""
    with driver_of("s3://stop/slow", **PATIENT) as driver:
        refs = [driver.append() for _ in range(4)]
        server.pause()
        waiting = begin_two_uploads(driver, refs)
        stop(driver)
        server.resume()

        assert [future.result(60)[0] for future in waiting] == [200, 200]
        driver.service.wait_for_end(60)
    assert stored_sets("s3://stop/slow") == {ref.change_set_id("job") for ref in refs}


def test_stop_ends_while_store_is_away(server: S3Server) -> None:
    """While the store is away a stop ends in time; waiting requests are refused, and the loss is reported."""
    with driver_of("s3://stop/away", **IMPATIENT) as driver:
        refs = [driver.append() for _ in range(4)]
        server.pause()
        waiting = begin_two_uploads(driver, refs)
        stopped = stop(driver)

        assert [future.result(60)[0] for future in waiting] == [503, 503]
        driver.service.wait_for_end(60)
        assert time.monotonic() - stopped < STOP_S + SLACK_S
        assert '"change_sets": 4' in driver.service.log()

        server.resume()
        driver.service.start()
        assert driver.complete(*refs[:3]).result(60)[0] == 410


def test_manifest_on_its_way_is_answered(server: S3Server) -> None:
    """A `complete` whose manifest hangs in the store is answered before the process ends."""
    with driver_of("s3://stop/manifest", **IMPATIENT) as driver:
        ref = driver.append()
        assert driver.flush(ref).result(60)[0] == 204
        wait_until(
            lambda: driver.service.metrics()["dstl_upload_seconds_count"] == 1,
            what="the upload of the set and the note",
        )
        server.pause()
        waiting = driver.complete(ref)
        stopped = stop(driver)

        assert waiting.result(60)[0] == 503
        driver.service.wait_for_end(60)
        assert time.monotonic() - stopped < STOP_S + SLACK_S


def test_append_during_stop_is_refused(folder: str) -> None:
    """A set whose last byte arrives after the stop has begun is refused with 503, and is not stored."""
    payload = b"payload"
    query = "operator=op&checkpoint_id=0&epoch=1&attempt=1&partition=0&sqn=0&first_key_group=0&last_key_group=127"
    head = f"POST /v1/jobs/job/change-sets?{query}&count=1&checksum={checksum64(payload):016x} HTTP/1.1\r\nhost: x\r\n"
    with driver_of(folder, **PATIENT) as driver:
        connection = driver.connect()
        connection.sendall(f"{head}content-length: {len(payload)}\r\nexpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")  # it waits for the body
        stop(driver)
        connection.sendall(payload)

        status, document = answer_of(read_all(connection))
        assert (status, document["kind"]) == (503, "closed")
        driver.service.wait_for_end(60)
    assert stored_sets(folder) == set()


def test_open_restore_does_not_delay_stop(folder: str) -> None:
    """A restore whose client stopped reading is closed in time."""
    payload = os.urandom(8 << 20)
    with driver_of(folder, DSTL_SHUTDOWN_TIMEOUT_S="3") as driver:
        answer = driver.complete(*(driver.append(payload) for _ in range(4))).result(60)[1]["ref"]
        query = f"operator=op&first_key_group=0&last_key_group=127&to={answer['id']}.{answer['generation']}.uid"
        connection = driver.connect()
        connection.sendall(f"GET /v1/jobs/job/restore?{query} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(1).startswith(b"H")
        stopped = stop(driver)

        driver.service.wait_for_end(60)
        assert time.monotonic() - stopped < 3 + SLACK_S
        connection.close()


def test_stop_under_load_keeps_what_it_received(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I7: every set acknowledged before or during a stop is durable after it, even without a request to persist."""
    monkeypatch.setattr("backend_client.service.client._LAST_TRY_S", 60.0)  # a slow answer is not due to the stop
    with driver_of(folder, **PATIENT) as driver:
        received: list[ChangeSetRef] = []
        ended = threading.Event()

        def load(attempt: int) -> None:
            client = ServiceClient(driver.service.address, patience_s=0)
            for sqn in itertools.count():
                try:
                    received.append(driver.job.append(os.urandom(100), sqn, client=client, attempt=attempt))
                except DstlError:
                    break
            client.close()
            ended.set()

        for attempt in range(4):
            driver.threads.submit(load, attempt)
        wait_until(lambda: len(received) > 200)
        stop(driver)
        driver.service.wait_for_end(60)
        assert ended.wait(60)
        driver.threads.shutdown()
    assert {ref.change_set_id("job") for ref in received} <= stored_sets(folder)
