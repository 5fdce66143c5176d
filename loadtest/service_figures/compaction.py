"""
Storage used by a sliding window: windows of 10 s that begin every second, 2,000 keys, 10,000 rows a second.

Each row changes the ten windows that it falls into, so that every checkpoint changes nearly the whole table, and every
second 2,000 windows begin and 2,000 end. The same change sets go to two services in parallel, one that compacts the log
and one that keeps it, like a log that only a materialization shortens. Both retain one checkpoint.

The table's size is that of its keys and values. The stored size is that of all objects, garbage included.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgpack

from backend_client.service.client import ServiceClient
from dstl_service.wire import OperatorInfo
from storage.key_groups import key_group_range
from tools.reporting.figures import Figure, Goal
from tools.servers.service.job_driver import JobDriver, restored_table
from tools.servers.service.process import ServiceProcess

KEYS = 2_000
ROWS_PER_SECOND = 10_000
WINDOW_S = 10
PARTITIONS = 4
MAX_PARALLELISM = 128
GOAL = 2.0

# By default a small log is not compacted, since its storage costs less than the requests.
_SETTINGS = {
    "DSTL_RETENTION_CHECKPOINTS_MAX": "1",
    "DSTL_RETENTION_DELAY_S": "0",
    "DSTL_COMPACTION_FLOOR_BYTES": "65536",
}
_WINDOWS = OperatorInfo("windows", PARTITIONS, "{}", {})


class Windows:
    """The workload: the changes of each second, and the resulting table."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._sums: dict[bytes, tuple[int, float]] = {}
        self.table: dict[bytes, bytes] = {}

    @property
    def table_bytes(self) -> int:
        """Size of all keys and values."""
        return sum(len(key) + len(value) for key, value in self.table.items())

    def second(self, now_s: int) -> dict[bytes, bytes | None]:
        """Return the changes by the rows and the window ends of one second."""
        changes: dict[bytes, bytes | None] = {_key(user, now_s - WINDOW_S): None for user in range(KEYS)}
        for _ in range(ROWS_PER_SECOND):
            user, amount = self._chance.randrange(KEYS), self._chance.random() * 100
            for begin_s in range(now_s - WINDOW_S + 1, now_s + 1):
                key = _key(user, begin_s)
                count, total = self._sums.get(key, (0, 0.0))
                self._sums[key] = count + 1, total + amount
                changes[key] = b""
        for key, value in changes.items():
            if value is None:
                self._sums.pop(key, None)
                self.table.pop(key, None)
            else:
                changes[key] = self.table[key] = msgpack.packb(self._sums[key])
        return changes


class Side:
    """One service and its job."""

    def __init__(self, name: str, folder: Path, stack: ExitStack, environment: dict[str, str]) -> None:
        self._storage = folder / name
        process = stack.enter_context(ServiceProcess(self._storage.as_uri(), environment))
        client = ServiceClient(process.address)
        stack.callback(client.close)
        self._job = JobDriver(client, operator=_WINDOWS.name, max_parallelism=MAX_PARALLELISM)
        self.stored: list[int] = []

    def checkpoint(self, parts: list[dict[bytes, bytes | None]]) -> None:
        """Log each partition's changes and complete the next checkpoint."""
        refs = []
        for partition, changes in enumerate(parts):
            key_groups = key_group_range(partition, PARTITIONS, MAX_PARALLELISM)
            refs += self._job.write(changes, partition=partition, key_groups=key_groups)
        self._job.complete(refs, operators=[_WINDOWS])

    def look(self) -> None:
        """Record the stored size."""
        self.stored.append(sum(_sizes(self._storage)))

    def restored(self, folder: Path) -> dict[bytes, bytes]:
        """Return the table restored from the newest checkpoint."""
        return restored_table(self._job.client, folder, self._job.base, operator=_WINDOWS.name)


def measure(*, short: bool) -> list[Figure]:
    """Run the workload in real time, one checkpoint a second; measure the storage ten times a second."""
    seconds = 12 if short else 60
    windows = Windows(seed=1)
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dstl-") as name, ExitStack() as stack:
        folder = Path(name)
        compacting = Side("compacting", folder, stack, _SETTINGS)
        keeping = Side("keeping", folder, stack, {**_SETTINGS, "DSTL_COMPACTION_ENABLED": "false"})
        begin = time.monotonic()
        for now_s in range(seconds):
            changes = windows.second(now_s)
            parts = _divided(changes)
            for side in (compacting, keeping):
                side.checkpoint(parts)
            while True:
                compacting.look()
                if now_s >= WINDOW_S:
                    ratios.append(compacting.stored[-1] / windows.table_bytes)
                if time.monotonic() >= begin + now_s + 1:
                    break
                time.sleep(0.1)
        keeping.look()
        right = [side.restored(folder / f"table-{n}") == windows.table for n, side in enumerate((compacting, keeping))]
        kept = keeping.stored[-1] / windows.table_bytes
    return [
        Figure("sliding window: stored / table, median", statistics.median(ratios), "ratio", Goal("<=", GOAL)),
        Figure("sliding window: stored / table, largest", max(ratios), "ratio", Goal("<=", GOAL)),
        Figure("sliding window: stored / table without compaction", kept, "ratio"),
        Figure("sliding window: table", windows.table_bytes / 1e6, "MB"),
        Figure("sliding window: restored tables that are right", sum(right), "tables", Goal("==", 2)),
    ]


def _key(user: int, begin_s: int) -> bytes:
    packed: bytes = msgpack.packb([f"user-{user:05d}"]) + msgpack.packb(begin_s)
    return bytes([0, user % MAX_PARALLELISM, 0, 0]) + packed


def _divided(changes: dict[bytes, bytes | None]) -> list[dict[bytes, bytes | None]]:
    parts: list[dict[bytes, bytes | None]] = [{} for _ in range(PARTITIONS)]
    for key, value in changes.items():
        parts[key[1] * PARTITIONS // MAX_PARALLELISM][key] = value
    return parts


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path.stat().st_size
        except FileNotFoundError:  # deleted meanwhile
            continue
