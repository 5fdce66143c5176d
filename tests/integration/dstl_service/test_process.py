"""
A real service process on a Unix socket, killed and stopped.

A failure means that data acknowledged as durable are missing after a crash, or that a loss goes unnoticed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from storage.errors import LostChangesError, UnavailableError
from storage.segment_format import decode_object
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def whole_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each service as a Python of its own, as hosts do, and not as a fork."""
    monkeypatch.setattr(ServiceProcess, "is_forked", False)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Return the folder of the storage."""
    return tmp_path / "storage"


@pytest.fixture
def service(storage: Path) -> Iterator[ServiceProcess]:
    """Return a running service."""
    with ServiceProcess(storage.as_uri()) as running:
        yield running


@pytest.fixture
def job(service: ServiceProcess) -> Iterator[JobDriver]:
    """Return a job at the service."""
    client = ServiceClient(service.address, patience_s=60)
    yield JobDriver(client)
    client.close()


def stored_payloads(storage: Path) -> list[bytes]:
    """Return the payloads of all segment objects, read without any service."""
    found = []
    for path in sorted(storage.glob("job/segments/*/*.seg")):
        found += [bytes(payload) for _, payload in decode_object(path.read_bytes(), path.name)]
    return sorted(found)


def test_killed_service_loses_received_set(service: ServiceProcess, job: JobDriver) -> None:
    """A set that was only received dies with the process: the loss is reported, and the batch executed again."""
    lost = job.append(b"lost")
    service.restart()
    with pytest.raises(LostChangesError):
        job.persist(lost)
    with pytest.raises(LostChangesError):
        job.complete([lost])

    job.complete([job.append(b"again", attempt=2)], uid="second-try")
    assert job.payloads() == [b"again"]


def test_killed_service_keeps_durable_set(service: ServiceProcess, job: JobDriver) -> None:
    """I5: a set whose handle was returned survives a kill, and so does the checkpoint that names it."""
    ref = job.append(b"durable")
    (handle,) = job.persist(ref)
    service.restart()
    job.complete([replace(ref, handle=handle)])
    service.restart()

    assert job.payloads() == [b"durable"]


def test_driver_goes_on_after_kill(service: ServiceProcess, job: JobDriver) -> None:
    """I5: a driver whose answer was lost with the process repeats its request and gets the same checkpoint."""
    ref = job.append(b"one")
    first = job.complete([ref]).ref
    service.restart()

    assert job.complete([ref], checkpoint_id=0, base=None).ref == first
    job.complete([job.append(b"two")])
    assert job.payloads() == [b"one", b"two"]


def test_stopped_service_uploads_what_waits(service: ServiceProcess, job: JobDriver, storage: Path) -> None:
    """A service that is told to stop uploads its received sets before it ends."""
    job.append(b"one")
    job.append(b"two", 1)
    assert stored_payloads(storage) == []
    job.client.close()
    service.stop()

    assert stored_payloads(storage) == [b"one", b"two"]


def test_stopped_service_answers_nobody(service: ServiceProcess, job: JobDriver) -> None:
    """After a stop the socket is dead, and the next service replaces it."""
    job.client.close()
    service.stop()
    with pytest.raises(UnavailableError):
        ServiceClient(service.address, patience_s=0.1).get("/v1/info")
    service.start()

    assert job.client.get("/v1/info")["jobs"] == []


def test_socket_is_private(service: ServiceProcess) -> None:
    """Only the user who started the service can reach it."""
    assert service.socket_path.stat().st_mode & 0o777 == 0o600


def test_large_set_is_restored(service: ServiceProcess, job: JobDriver) -> None:
    """A set of many megabytes is restored unchanged over the real socket."""
    payload = os.urandom(8 << 20)
    job.complete([job.append(payload)])
    service.restart()

    assert job.payloads() == [payload]


def test_idle_service_goes_away(storage: Path) -> None:
    """A service without requests stops by itself after its idle time."""
    with ServiceProcess(storage.as_uri(), arguments=["--idle-exit-s", "1"]) as service:
        assert service.wait_for_end(90) in (0, -signal.SIGTERM)
