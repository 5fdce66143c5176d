"""
A real run of one workload: what each checkpoint uploads, and how large it is, with the changelog and without.

With it, a job writes change sets to a service, which stores, compacts and materializes as usual, at an S3 server.
Without it, a second table takes the same changes, and each of its checkpoints, made by RocksDB itself, uploads the
SST files that the one before did not have.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from backend_client.service.client import ServiceClient
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.restore import Advance, advance_to_base
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from dstl_service.wire import OperatorInfo
from loadtest.bench_tables.workloads import KEY_GROUPS, SCALE, Changes, Workload
from tools.servers.service.job_driver import JobDriver

_MB = 1 << 20
_OPERATOR = OperatorInfo("op", 1, "{}", {})
_LOOKS = 60
"""How often the whole size of a checkpoint is looked at."""


def settings(workload: Workload) -> dict[str, str]:
    """Return the service's settings: the defaults, with what is given in bytes made smaller like the state."""
    return {
        "DSTL_MATERIALIZATION_ENABLED": "true",
        "DSTL_MATERIALIZATION_LOG_RATIO": str(workload.log_ratio),
        "DSTL_MATERIALIZATION_LOG_FLOOR_BYTES": str(64 * _MB // SCALE),
        "DSTL_COMPACTION_FLOOR_BYTES": str(4 * _MB // SCALE),
    }


@dataclass(slots=True)
class Recording:
    """What one subtask's checkpoints upload, and how large they are; in bytes, at the scale of the workload."""

    on: list[int] = field(default_factory=list)
    """Change sets of each checkpoint."""
    off: list[list[int]] = field(default_factory=list)
    """New SST files of each checkpoint; with the changelog there are `Workload.off_every` in the same time."""
    full_on: list[int] = field(default_factory=list)
    """Snapshot and log that a checkpoint restores from."""
    full_off: list[int] = field(default_factory=list)
    """SST files of a checkpoint."""
    on_ms: list[float] = field(default_factory=list)
    """How long each checkpoint took, from the task's begin, at the S3 server as it is."""
    materialized: list[int] = field(default_factory=list)
    """Numbers of the checkpoints that first name a stored snapshot."""
    stored: list[tuple[int, int, int]] = field(default_factory=list)
    """Objects and bytes in the storage, after the checkpoint with this number."""


class LoggedJob:
    """
    A job of one task, as the driver and the task run it; it hands over snapshots when the service asks for them.

    Args:
        client: Of the service.
        folder: For the task's table.
    """

    def __init__(self, client: ServiceClient, folder: Path) -> None:
        self.client = client
        self.job = JobDriver(client, max_parallelism=len(KEY_GROUPS))
        self.is_stored = False
        """Whether the newest checkpoint names a stored snapshot that is new in it."""
        self._folder = folder

    def checkpoint(self, changes: Changes) -> int:
        """Log the changes in a new checkpoint; return the bytes of its change sets."""
        table, advance = open_advanced(self._folder, self._advance)
        if advance.materialize and self.job.base is not None:
            hand_over_snapshot(table, self.client, self.job.name, self.job.operator, KEY_GROUPS, self.job.base)
        table.close()
        refs = self.job.write(changes)
        told = [] if advance.materialized is None else [advance.materialized]
        self.job.complete(refs, operators=[_OPERATOR], materializations=told)
        self.is_stored = any("index" in one for one in told)
        return sum(ref.size_bytes for ref in refs)

    def full_bytes(self) -> int:
        """Return the size of the objects that the newest checkpoint restores from."""
        assert self.job.base is not None
        restore = self.client.restore(self.job.name, self.job.operator, KEY_GROUPS, None, self.job.base.to_text())
        with restore as frames:
            sizes = [header["bytes"] for header, _ in frames if header["kind"] == "plan"]
        return int(sizes[0])

    def _advance(self, table: StateTable) -> Advance:
        return advance_to_base(table, self.client, self.job.name, self.job.operator, KEY_GROUPS, self.job.base)


class PlainTable:
    """
    A table whose checkpoints are RocksDB's own.

    Args:
        folder: For the table.
    """

    def __init__(self, folder: Path) -> None:
        self._table = StateTable.open(folder)
        self._known: set[str] = set()
        self._version = 0

    def take(self, changes: Changes) -> None:
        """Write changes."""
        self._version += 1
        self._table.advance(changes.items(), str(self._version))

    def checkpoint(self) -> tuple[list[int], int]:
        """Make a checkpoint; return the sizes of its new files, and the size of all."""
        with self._table.making_snapshot() as folder:
            sizes = {file.name: file.stat().st_size for file in folder.glob("*.sst")}
        shutil.rmtree(folder)
        new = [size for name, size in sizes.items() if name not in self._known]
        self._known = set(sizes)
        return new, sum(sizes.values())

    def close(self) -> None:
        """Close the table."""
        self._table.close()


def record(workload: Workload, job: LoggedJob, folder: Path, checkpoints: int, storage: Path, pace: float) -> Recording:
    """
    Fill the tables, then run `checkpoints` with the changelog and, in the same time, those without it.

    Ends at a checkpoint whose size is at least the median, so that what is restored from it is not the best case.

    Args:
        workload: Makes the changes.
        job: With the changelog.
        folder: For the table without it.
        checkpoints: How many are made after the tables are full.
        storage: Folder in which the S3 server keeps its objects as files.
        pace: How much faster than published the checkpoints follow each other at most: compaction and snapshots, which
            go on beside them, take as long as usual.
    """
    found, plain = Recording(), PlainTable(folder)
    look_every = max(1, checkpoints // _LOOKS)
    for changes in workload.fill():
        job.checkpoint(changes)
        plain.take(changes)
    plain.checkpoint()
    for number in range(1, checkpoints + 1):
        changes = workload.changes()
        begun_s = time.monotonic()
        found.on.append(job.checkpoint(changes))
        found.on_ms.append((time.monotonic() - begun_s) * 1000)
        if job.is_stored:
            found.materialized.append(number)
        plain.take(changes)
        if number % workload.off_every == 0:
            new, full = plain.checkpoint()
            found.off.append(new)
            found.full_off.append(full)
        if number % look_every == 0:
            found.full_on.append(job.full_bytes())
            sizes = list(_sizes(storage))
            found.stored.append((number, len(sizes), sum(sizes)))
        time.sleep(max(0.0, workload.interval_s / pace - (time.monotonic() - begun_s)))
    plain.close()
    median = sorted(found.full_on)[len(found.full_on) // 2]
    for _ in range(checkpoints):
        if job.full_bytes() >= median:
            break
        job.checkpoint(workload.changes())
    return found


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the sizes of the files below a folder, without those that are being deleted."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
