"""
A job with real tables and a real sidecar process, driven batch by batch without Spark.

Each batch acts like tasks and driver: it advances the tables, hands over requested snapshots, logs changes, and
completes the checkpoint with the tasks' reports. A plain dict has the expected state.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from backend_client.service.client import ServiceClient
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.restore import Advance, advance_to_base
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from dstl_service.formats.manifest import StateView
from dstl_service.formats.materialization_index import MaterializationIndex, read_index
from dstl_service.formats.under_way import is_announcement
from dstl_service.registry.job_store import JobStore
from dstl_service.wire import OperatorInfo
from storage.clock import SystemClock, SystemIds
from storage.key_groups import KeyGroupRange, key_group_range
from storage.local_store import LocalStore
from storage.model import MaterializationHandle
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

MAX_PARALLELISM = 128
Report: TypeAlias = Callable[[dict[str, Any]], bool]
"""Chooses which stored snapshots the driver is told of."""
ALWAYS = {
    # Due whenever changes were logged, and again soon after a failure.
    "DSTL_MATERIALIZATION_ENABLED": "true",  # tests of whole jobs disable it for those that count objects
    "DSTL_MATERIALIZATION_LOG_FLOOR_BYTES": "1",
    "DSTL_MATERIALIZATION_LOG_RATIO": "0",
    "DSTL_MATERIALIZATION_INTERVAL_S": "1",
    "DSTL_COMPACTION_ENABLED": "false",
}


def report_all(_: dict[str, Any]) -> bool:
    """Report every stored snapshot to the driver."""
    return True


def report_none(_: dict[str, Any]) -> bool:
    """Report no snapshot to the driver."""
    return False


class MaterializingJob(JobDriver):
    """A driver and its tasks, run one after the other, on one sidecar."""

    def __init__(self, sidecar: ServiceProcess, folder: Path, parallelism: int = 2, seed: int = 1) -> None:
        super().__init__(ServiceClient(sidecar.address, patience_s=60), max_parallelism=MAX_PARALLELISM)
        self.sidecar = sidecar
        self.folder = folder
        self.parallelism = parallelism
        self.state: dict[bytes, bytes] = {}
        self.advances: list[Advance] = []
        self.handed_over = 0
        self._chance = random.Random(seed)
        self._attempt = 0

    def batch(self, keys: int = 40, *, value_bytes: int = 200, deleted: int = 5, report: Report = report_all) -> None:
        """Execute one batch: change some keys of every partition, delete others, complete the checkpoint."""
        refs, materialized = [], []
        for partition in range(self.parallelism):
            key_groups = key_group_range(partition, self.parallelism, MAX_PARALLELISM)
            with self.table(key_groups) as (table, advance):
                self.advances.append(advance)
                if advance.materialize and self.base is not None:
                    taken = hand_over_snapshot(table, self.client, "job", "op", key_groups, self.base)
                    self.handed_over += taken
            told = advance.materialized
            if told is not None and (is_announcement(told) or report(told)):
                materialized.append(told)
            self._attempt += 1
            changes = self._changes(key_groups, keys, value_bytes, deleted)
            refs += self.write(changes, partition=partition, attempt=self._attempt, key_groups=key_groups)
            for key, value in changes.items():
                if value is None:
                    self.state.pop(key, None)
                else:
                    self.state[key] = value
        operator = OperatorInfo("op", self.parallelism, "{}", {})
        self.complete(refs, operators=[operator], materializations=materialized)

    def batches_until(self, condition: Callable[[], Any], what: str, *, apart_s: float = 0.0, **options: Any) -> int:
        """
        Execute batches until a condition holds; return their number.

        What the service does by time needs no more of them than come `apart_s` seconds apart.
        """
        deadline = time.monotonic() + 120
        count = 0
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come about; the service's log:\n{self.sidecar.log()}"
            time.sleep(apart_s)
            self.batch(**options)
            count += 1
        return count

    @contextmanager
    def table(self, key_groups: KeyGroupRange, folder: str = "tables") -> Iterator[tuple[StateTable, Advance]]:
        """Open a table of these key groups at the base."""
        table, advance = open_advanced(
            self.folder / folder / key_groups.to_text(),
            lambda table: advance_to_base(table, self.client, "job", "op", key_groups, self.base),
        )
        try:
            yield table, advance
        finally:
            table.close()

    def restored(self, parallelism: int, folder: str) -> dict[bytes, bytes]:
        """Return the content of tables of another parallelism restored from nothing."""
        found: dict[bytes, bytes] = {}
        for partition in range(parallelism):
            key_groups = key_group_range(partition, parallelism, MAX_PARALLELISM)
            with self.table(key_groups, folder) as (table, _):
                assert table.version == (self.base.to_text() if self.base else None)
                for key, value in table.items():
                    assert key_groups.contains(int.from_bytes(key[:2], "big"))
                    assert key not in found
                    found[key] = value
        return found

    def view(self) -> StateView:
        """Return the parts of the newest checkpoint's state."""
        assert self.base is not None
        jobs = JobStore(LocalStore(self.folder / "store"), "job", SystemClock(), SystemIds())
        return jobs.state(self.base)

    def index(self, handle: MaterializationHandle) -> MaterializationIndex:
        """Return the index of a materialization."""
        return read_index(LocalStore(self.folder / "store"), handle)

    def save(self, name: str) -> None:
        """Keep the newest checkpoint as a savepoint."""
        assert self.sidecar.ask("PUT", f"{self.path}/savepoints/{name}", b"{}")

    def objects(self, pattern: str) -> set[Path]:
        """Return the store's files below the job's materializations whose names match."""
        return set((self.folder / "store" / "job" / "materialized").rglob(pattern))

    def snapshots_left(self) -> list[Path]:
        """Return the snapshot folders beside tables."""
        return list((self.folder / "tables").rglob("*.snapshot-*"))

    def metric(self, name: str) -> float:
        """Return a metric of the sidecar, summed over all labels."""
        return self.sidecar.metrics()[name]

    def _changes(
        self, key_groups: KeyGroupRange, keys: int, value_bytes: int, deleted: int
    ) -> dict[bytes, bytes | None]:
        chance = self._chance
        changes: dict[bytes, bytes | None] = {}
        for _ in range(keys):
            key_group = chance.randint(key_groups.first, key_groups.last)
            changes[key_group.to_bytes(2, "big") + bytes([0, 0, chance.randrange(64)])] = chance.randbytes(value_bytes)
        own = [key for key in self.state if key_groups.contains(int.from_bytes(key[:2], "big"))]
        changes.update(dict.fromkeys(chance.sample(own, min(deleted, len(own)))))
        return changes


@contextmanager
def running_job(
    folder: Path, environment: Mapping[str, str] | None = None, parallelism: int = 2
) -> Iterator[MaterializingJob]:
    """
    Start a sidecar with a job; it is killed in the end.

    Args:
        folder: Folder of the store and the tables.
        environment: Settings of the sidecar besides `ALWAYS`.
        parallelism: Number of tables.
    """
    with ServiceProcess((folder / "store").as_uri(), {**ALWAYS, **(environment or {})}) as sidecar:
        job = MaterializingJob(sidecar, folder, parallelism)
        try:
            yield job
        finally:
            job.client.close()
            sidecar.stop(signal.SIGKILL)
