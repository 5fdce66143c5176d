"""
Hosts that are cut off without notice, like a machine that loses power, and the coordinator's handling of their sets.

A failure means that a checkpoint waits for a lost host until the whole checkpoint times out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from dstl_service.peers.client import PeerClient
from dstl_service.wire import ChangeSetRef, LogTarget
from storage.errors import LostChangesError
from storage.key_groups import KeyGroupRange
from tests.support.machine import Host

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SILENT = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7071))
connection, _ = listener.accept()
connection.recv(1)
print("asked", flush=True)
connection.recv(1 << 20)
sys.stdin.read()
"""
PATIENCE_S = 600


@pytest.fixture
def host() -> Iterator[Host]:
    """Another host."""
    with Host() as made:
        yield made


def test_host_that_vanished_before_it_is_asked(host: Host, tmp_path: Path) -> None:
    """I7: a host that accepts no connection counts as lost at once; the batch is executed again."""
    (tmp_path / "token").write_text("secret")
    command = [sys.executable, "-m", "dstl_service", "serve", "--storage", (tmp_path / "store").as_uri()]
    command += ["--host", host.address, "--port", "7071", "--token-file", str(tmp_path / "token")]
    process = subprocess.Popen(host.command(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://{host.address}:7071"
    peers = PeerClient(lambda: "secret", PATIENCE_S)
    try:
        client = ServiceClient(url, "secret", patience_s=30)
        client.post("/v1/jobs/job/epochs", {"owner": "test"})
        writer = LogWriter(client, LogTarget("job", "op", 0, 1, 1, 0, KeyGroupRange(0, 127)))
        writer.append({b"\0\0\0\1k": b"v"}, preemptive=False)
        refs = writer.refs
        assert peers.persist(url, "job", refs, wait=False) == []

        host.cut_off()

        for wait in (False, True):
            with pytest.raises(LostChangesError, match="cannot be reached"):
                peers.persist(url, "job", refs, wait=wait)
    finally:
        process.kill()
        process.wait()


def test_host_that_vanishes_while_it_is_asked(host: Host) -> None:
    """The coordinator waits for a slow answer only while the host is reachable."""
    command = host.command([sys.executable, "-c", SILENT, host.address])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ref = ChangeSetRef("op", 0, 1, 1, 0, 0, 1, "service")
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(_ask_when_there, f"http://{host.address}:7071", ref)
            assert process.stdout.readline() == "asked\n"

            host.cut_off()

            with pytest.raises(LostChangesError, match="cannot be reached"):
                asked.result()
    finally:
        process.kill()
        process.communicate()


def _ask_when_there(url: str, ref: ChangeSetRef) -> None:
    while True:
        try:
            PeerClient(lambda: None, PATIENCE_S).persist(url, "job", [ref], wait=True)
        except LostChangesError as error:
            if "refused" not in str(error):
                raise
