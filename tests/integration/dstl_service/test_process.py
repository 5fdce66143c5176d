"""
A real service process on a Unix socket, killed and stopped.

A failure means that data acknowledged as durable are missing after a crash, or that a loss goes unnoticed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget
from storage.checksum import checksum64
from storage.errors import LostChangesError, UnavailableError
from storage.key_groups import KeyGroupRange
from storage.segment_format import decode_object

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GROUPS = KeyGroupRange(0, 127)


class Process:
    """A service that is started, killed and restarted on the same storage and socket."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.socket = folder / "s"
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> None:
        """Start the process; clients wait for it by themselves."""
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", self.storage.as_uri()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--socket", str(self.socket)], stdout=log, stderr=log, env={**os.environ, **environment}
            )

    def end(self, how: signal.Signals) -> int:
        """End the process by its id; return its exit code."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=60)

    def client(self) -> ServiceClient:
        """Return a client that waits for the process."""
        return ServiceClient(f"unix://{self.socket}", patience_s=60)

    def payloads(self) -> list[bytes]:
        """Return the payloads of all segment objects, read without any service."""
        found = []
        for path in sorted(self.storage.glob("job/segments/*/*.seg")):
            found += [bytes(payload) for _, payload in decode_object(path.read_bytes(), path.name)]
        return sorted(found)


@pytest.fixture
def process() -> Iterator[Process]:
    """Return a started process; it is killed after the test if it still runs."""
    with tempfile.TemporaryDirectory(prefix="dp") as folder:
        made = Process(Path(folder))
        made.start()
        try:
            yield made
        finally:
            if made.process is not None and made.process.poll() is None:
                made.end(signal.SIGKILL)


@pytest.fixture
def client(process: Process) -> Iterator[ServiceClient]:
    """Return a client that owns the job."""
    made = process.client()
    made.post("/v1/jobs/job/epochs", {"owner": "test"})
    yield made
    made.close()


def append(
    client: ServiceClient, payload: bytes, sqn: int = 0, attempt: int = 1, checkpoint_id: int = 0
) -> ChangeSetRef:
    """Send a set."""
    target = LogTarget("job", "op", checkpoint_id, 1, attempt, 0, GROUPS)
    return client.append(target, sqn, payload, checksum64(payload), 1, preemptive=False)


def complete(
    client: ServiceClient, checkpoint_id: int, base: Any, *refs: ChangeSetRef, uid: str = ""
) -> dict[str, Any]:
    """Complete a checkpoint; return its reference."""
    body = {
        "epoch": 1,
        "uid": uid or f"uid-{checkpoint_id}",
        "base": base,
        "refs": [asdict(ref) for ref in refs],
        "operators": [],
        "query_id": "",
        "offsets": "",
    }
    answer: dict[str, Any] = client.post(f"/v1/jobs/job/checkpoints/{checkpoint_id}/complete", body)["ref"]
    return answer


def restored(client: ServiceClient, ref: dict[str, Any]) -> list[bytes]:
    """Return the payloads of a whole restore."""
    with client.restore("job", "op", GROUPS, None, CheckpointRef(**ref).to_text()) as frames:
        return [payload for header, payload in frames if header["kind"] == "segment"]


def test_killed_service_loses_received_set(process: Process, client: ServiceClient) -> None:
    """A set that was only received dies with the process: the loss is reported, and the batch executed again."""
    lost = append(client, b"lost")
    process.end(signal.SIGKILL)
    process.start()
    with pytest.raises(LostChangesError):
        client.persist("job", 1, [lost])
    with pytest.raises(LostChangesError):
        complete(client, 0, None, lost)

    ref = complete(client, 0, None, append(client, b"again", attempt=2), uid="second-try")
    assert restored(client, ref) == [b"again"]


def test_killed_service_keeps_durable_set(process: Process, client: ServiceClient) -> None:
    """I5: a set whose handle was returned survives a kill, and so does the checkpoint that names it."""
    ref = append(client, b"durable")
    (handle,) = client.persist("job", 1, [ref])
    process.end(signal.SIGKILL)
    process.start()
    completed = complete(client, 0, None, ChangeSetRef(**{**asdict(ref), "handle": handle}))
    process.end(signal.SIGKILL)
    process.start()

    assert restored(client, completed) == [b"durable"]


def test_driver_goes_on_after_kill(process: Process, client: ServiceClient) -> None:
    """I5: a driver whose answer was lost with the process repeats its request and gets the same checkpoint."""
    ref = append(client, b"one")
    first = complete(client, 0, None, ref)
    process.end(signal.SIGKILL)
    process.start()

    assert complete(client, 0, None, ref) == first
    second = complete(client, 1, first, append(client, b"two", checkpoint_id=1))
    assert restored(client, second) == [b"one", b"two"]


def test_stopped_service_uploads_what_waits(process: Process, client: ServiceClient) -> None:
    """A service that is told to stop uploads its received sets before it ends."""
    append(client, b"one")
    append(client, b"two", sqn=1)
    assert process.payloads() == []
    client.close()
    process.end(signal.SIGTERM)

    assert process.payloads() == [b"one", b"two"]


def test_stopped_service_answers_nobody(process: Process, client: ServiceClient) -> None:
    """After a stop the socket is dead, and the next service replaces it."""
    client.close()
    process.end(signal.SIGTERM)
    with pytest.raises(UnavailableError):
        ServiceClient(f"unix://{process.socket}", patience_s=0.1).get("/v1/info")
    process.start()

    assert client.get("/v1/info")["jobs"] == []


def test_socket_is_private(process: Process, client: ServiceClient) -> None:
    """Only the user who started the service can reach it."""
    assert process.socket.stat().st_mode & 0o777 == 0o600


def test_large_set_is_restored(process: Process, client: ServiceClient) -> None:
    """A set of many megabytes is restored unchanged over the real socket."""
    payload = os.urandom(8 << 20)
    ref = complete(client, 0, None, append(client, payload))
    process.end(signal.SIGKILL)
    process.start()

    assert restored(client, ref) == [payload]


def test_idle_service_goes_away() -> None:
    """A service without requests stops by itself after its idle time."""
    with tempfile.TemporaryDirectory(prefix="dp") as folder:
        command = [sys.executable, "-m", "dstl_service", "serve", "--storage", Path(folder, "storage").as_uri()]
        command += ["--socket", f"{folder}/s", "--idle-exit-s", "1"]
        stopped = subprocess.run(command, capture_output=True, timeout=90, check=False)

    assert stopped.returncode in (0, -signal.SIGTERM)
