"""
Damaged segment objects and a restoring table, with a real service process between them (I10).

Steps: a log of several partitions and checkpoints is written through the service; then single bits of its objects are
flipped, or their ends cut off, and a table is restored. A failure means that damage reached a table unnoticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backend_client.service.client import ServiceClient
from dstl_service.wire import CheckpointRef
from storage.errors import CorruptDataError
from storage.key_groups import KeyGroupRange
from tools.servers.service.job_driver import JobDriver, restored_table
from tools.servers.service.process import ServiceProcess

pytestmark = pytest.mark.integration

PARTITIONS = [KeyGroupRange(0, 63), KeyGroupRange(64, 127)]
CHECKPOINTS = 3
POSITIONS = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store's folder."""
    return tmp_path_factory.mktemp("store")


@contextmanager
def running_client(store: Path) -> Iterator[ServiceClient]:
    """Run a service process on the store, and return a client of it."""
    with ServiceProcess(store.as_uri()) as service:
        client = ServiceClient(service.address)
        yield client
        client.close()


@pytest.fixture(scope="module")
def log(store: Path) -> tuple[CheckpointRef, dict[bytes, bytes], list[Path]]:
    """Return the newest checkpoint of a small log, the expected table, and the objects."""
    table: dict[bytes, bytes] = {}
    chance = random.Random(7)
    with running_client(store) as client:
        job = JobDriver(client)
        for checkpoint_id in range(CHECKPOINTS):
            refs = []
            for partition, key_groups in enumerate(PARTITIONS):
                groups = [chance.randint(key_groups.first, key_groups.last) for _ in range(30)]
                changes = {bytes([0, group, 0, 1]) + chance.randbytes(8): chance.randbytes(16) for group in groups}
                attempt = 10 * checkpoint_id + partition
                refs += job.write(dict(changes), partition=partition, attempt=attempt, key_groups=key_groups)
                table.update(changes)
            job.complete(refs)
        base = job.base
    assert base is not None
    objects = sorted((store / "job" / "segments").rglob("*.seg"))
    assert len(objects) == CHECKPOINTS
    return base, table, objects


@pytest.fixture
def fresh(store: Path, log: object) -> Iterator[ServiceClient]:
    """Return a client of another service process on the same store, without any of the log in memory."""
    with running_client(store) as client:
        yield client


def test_undamaged_log_restores(
    fresh: ServiceClient, log: tuple[CheckpointRef, dict[bytes, bytes], list[Path]], tmp_path: Path
) -> None:
    """Without damage the table has the last value of every key."""
    base, table, _ = log

    assert restored_table(fresh, tmp_path / "table", base) == table


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
            restored_table(fresh, tmp_path / "table", base)
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
                restored_table(fresh, tmp_path / "table", base)
        path.unlink()
        with pytest.raises(CorruptDataError, match=path.name):
            restored_table(fresh, tmp_path / "table", base)
        path.write_bytes(data)
