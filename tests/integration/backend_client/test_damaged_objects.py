"""
Damaged segment objects and a restoring table, with a real service process between them (I10).

Steps: a log of several partitions and checkpoints is written through the service; then single bits of its objects are
flipped, or their ends cut off, and a table is restored. A failure means that damage reached a table unnoticed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from backend_client.service.log_writer import LogWriter
from backend_client.service.restore import advance_to_base
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef, LogTarget
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange

pytestmark = pytest.mark.integration

PARTITIONS = [KeyGroupRange(0, 63), KeyGroupRange(64, 127)]
ALL = KeyGroupRange(0, 127)
CHECKPOINTS = 3
POSITIONS = 200


@contextmanager
def running_service(folder: str, store: Path) -> Iterator[ServiceClient]:
    """Run a service process on `store`; it is stopped by its pid."""
    command = [sys.executable, "-m", "dstl_service", "serve", "--storage", f"file://{store}"]
    process = subprocess.Popen(
        [*command, "--socket", f"{folder}/s.sock"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    client = ServiceClient(f"unix://{folder}/s.sock", patience_s=60)
    try:
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[ServiceClient, Path]]:
    """Return a separate service process, and its store's folder."""
    with tempfile.TemporaryDirectory(prefix="dstl-") as folder:
        store = Path(folder) / "store"
        with running_service(folder, store) as client:
            yield client, store


@pytest.fixture(scope="module")
def log(service: tuple[ServiceClient, Path]) -> tuple[CheckpointRef, dict[bytes, bytes], list[Path]]:
    """Return the newest checkpoint of a small log, the expected table, and the objects."""
    client, folder = service
    epoch = client.post("/v1/jobs/job/epochs", {"owner": "test"})["epoch"]
    table: dict[bytes, bytes] = {}
    base: CheckpointRef | None = None
    chance = random.Random(7)
    for checkpoint_id in range(CHECKPOINTS):
        refs = []
        for partition, key_groups in enumerate(PARTITIONS):
            target = LogTarget("job", "op", checkpoint_id, epoch, 10 * checkpoint_id + partition, partition, key_groups)
            writer = LogWriter(client, target)
            groups = [chance.randint(key_groups.first, key_groups.last) for _ in range(30)]
            changes = {bytes([0, group, 0, 1]) + chance.randbytes(8): chance.randbytes(16) for group in groups}
            writer.append(dict(changes), preemptive=False)
            table.update(changes)
            refs += writer.refs
        answer = client.post(
            f"/v1/jobs/job/checkpoints/{checkpoint_id}/complete",
            {
                "epoch": epoch,
                "uid": f"uid-{checkpoint_id}",
                "base": None if base is None else {"id": base.id, "generation": base.generation, "uid": base.uid},
                "refs": [asdict(ref) for ref in refs],
                "operators": [],
            },
        )
        base = CheckpointRef(**answer["ref"])
    assert base is not None
    objects = sorted((folder / "job" / "segments").rglob("*.seg"))
    assert len(objects) == CHECKPOINTS
    return base, table, objects


def restore(client: ServiceClient, folder: Path, base: CheckpointRef) -> dict[bytes, bytes]:
    table = StateTable.open(folder)
    try:
        advance_to_base(table, client, "job", "op", ALL, base)
        return dict(table.items())
    finally:
        table.close()


@pytest.fixture
def fresh(service: tuple[ServiceClient, Path], log: object) -> Iterator[ServiceClient]:
    """Return a second service process on the same store, without any of the log in memory."""
    with tempfile.TemporaryDirectory(prefix="dstl-") as folder, running_service(folder, service[1]) as client:
        yield client


def test_undamaged_log_restores(
    fresh: ServiceClient, log: tuple[CheckpointRef, dict[bytes, bytes], list[Path]], tmp_path: Path
) -> None:
    """Without damage the table has the last value of every key."""
    base, table, _ = log

    assert restore(fresh, tmp_path / "table", base) == table


def test_flipped_bit_is_named_not_read(
    fresh: ServiceClient, log: tuple[CheckpointRef, dict[bytes, bytes], list[Path]], tmp_path: Path
) -> None:
    """I10: a flipped bit at any of 200 random positions fails the restore with the object's name."""
    base, _, objects = log
    chance = random.Random(11)
    for _ in range(POSITIONS):
        path = chance.choice(objects)
        data = path.read_bytes()
        position = chance.randrange(len(data) * 8)
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(CorruptDataError, match=path.name):
            restore(fresh, tmp_path / "table", base)
        path.write_bytes(data)


def test_cut_object_is_named_not_read(
    fresh: ServiceClient, log: tuple[CheckpointRef, dict[bytes, bytes], list[Path]], tmp_path: Path
) -> None:
    """I10: a truncated or missing object fails the restore with its name."""
    base, _, objects = log
    chance = random.Random(12)
    for path in objects:
        data = path.read_bytes()
        for size in [0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(10))]:
            path.write_bytes(data[:size])
            with pytest.raises(CorruptDataError, match=path.name):
                restore(fresh, tmp_path / "table", base)
        path.unlink()
        with pytest.raises(CorruptDataError, match=path.name):
            restore(fresh, tmp_path / "table", base)
        path.write_bytes(data)
