"""
A sidecar that is killed in the middle of a restore, with a real process at the other end of the socket.

A failure means that a task fails, or worse restores a part, because its sidecar died at the wrong moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from backend_client.service.restore import advance_to_base
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef
from storage.errors import UnavailableError
from tools.servers.service.job_driver import ALL_KEY_GROUPS, JobDriver
from tools.servers.service.process import ServiceProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SETS = 24
SET_BYTES = 1 << 20  # much more than a socket buffers, so that a killed sidecar loses the rest of the stream


class InterruptedClient:
    """A real client; while it reads a restore stream, the sidecar is killed, as often as set."""

    def __init__(self, client: ServiceClient, sidecar: ServiceProcess, kills: int) -> None:
        self._client = client
        self._sidecar = sidecar
        self.kills_left = kills

    @contextmanager
    def restore(self, *arguments: Any) -> Iterator[Iterator[Any]]:
        """Open the real stream."""
        with self._client.restore(*arguments) as frames:
            yield self._killing(frames)

    def _killing(self, frames: Iterator[Any]) -> Iterator[Any]:
        for number, frame in enumerate(frames):
            yield frame
            if number == 1 and self.kills_left:
                self.kills_left -= 1
                self._sidecar.restart()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServiceProcess]:
    """Return a running sidecar."""
    with ServiceProcess((tmp_path / "store").as_uri()) as running:
        yield running


@pytest.fixture
def client(sidecar: ServiceProcess) -> Iterator[ServiceClient]:
    """Return a client of it."""
    made = ServiceClient(sidecar.address, patience_s=30)
    yield made
    made.close()


@pytest.fixture
def base(client: ServiceClient) -> tuple[CheckpointRef, dict[bytes, bytes]]:
    """Return a checkpoint of many large sets, and the content of a table at it."""
    job = JobDriver(client)
    writer = LogWriter(client, job.target())
    chance = random.Random(5)
    table: dict[bytes, bytes] = {}
    for number in range(SETS):
        changes = {bytes([0, number % 128, 0, 1]) + chance.randbytes(8): chance.randbytes(SET_BYTES)}
        writer.append(dict(changes), preemptive=True)
        table.update(changes)
    return job.complete(writer.refs).ref, table


@pytest.fixture
def table(tmp_path: Path) -> Iterator[StateTable]:
    """Return an empty table."""
    made = StateTable.open(tmp_path / "table")
    yield made
    made.close()


def test_restore_survives_killed_sidecar(
    sidecar: ServiceProcess, client: ServiceClient, base: tuple[CheckpointRef, dict[bytes, bytes]], table: StateTable
) -> None:
    """The restore starts again at the sidecar's replacement, and the table is that of the checkpoint."""
    ref, expected = base
    interrupted: Any = InterruptedClient(client, sidecar, kills=2)
    advance_to_base(table, interrupted, "job", "op", ALL_KEY_GROUPS, ref)

    assert interrupted.kills_left == 0
    assert (table.version, dict(table.items())) == (ref.to_text(), expected)


def test_sidecar_that_keeps_dying_is_reported(
    sidecar: ServiceProcess, client: ServiceClient, base: tuple[CheckpointRef, dict[bytes, bytes]], table: StateTable
) -> None:
    """A restore that never completes raises an error, and the table has no version; later it succeeds."""
    ref, expected = base
    with pytest.raises(UnavailableError, match="broke off a stream"):
        # Replaces a client.
        advance_to_base(table, InterruptedClient(client, sidecar, kills=9), "job", "op", ALL_KEY_GROUPS, ref)  # type: ignore[arg-type]
    assert table.version is None

    advance_to_base(table, client, "job", "op", ALL_KEY_GROUPS, ref)
    assert dict(table.items()) == expected
