"""
Figure 6: the cost of a table's restore, from a real S3 server and without any local copy.

A table of values that do not compress is stored as a snapshot, with a log after it. New service processes, whose caches
are empty, then restore it: once for exactly its own key groups, as after a loss, and once for half of them, as after a
change of the parallelism. Cost is the CPU time of worker and sidecar together, up to the first read of a key.
"""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backend_client.service.client import ServiceClient
from backend_client.service.hand_over import hand_over_snapshot
from backend_client.service.restore import Advance, advance_to_base
from backend_client.table.opening import open_advanced
from backend_client.table.state_table import StateTable
from dstl_service.wire import CheckpointRef, OperatorInfo
from storage.key_groups import KeyGroupRange
from tools.reporting.figures import Figure, Goal
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import ALL_KEY_GROUPS, JobDriver
from tools.servers.service.process import ServiceProcess

BUCKET = "restore"
VALUE_BYTES = 1024
_RESTORES = (("own key groups", ALL_KEY_GROUPS, 150), ("half of the key groups", KeyGroupRange(0, 63), 60))
"""Restored state, and the goal in MB of it per CPU second."""
_ALWAYS_DUE = {
    "DSTL_MATERIALIZATION_ENABLED": "true",  # whatever the environment says
    "DSTL_MATERIALIZATION_LOG_FLOOR_BYTES": "1",
    "DSTL_MATERIALIZATION_LOG_RATIO": "0",
    "DSTL_MATERIALIZATION_INTERVAL_S": "1",
    "DSTL_COMPACTION_ENABLED": "false",
}
_WAIT_S = 120.0
_LOG_TAIL_CHARS = 3_000

State = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Restored:
    """The cost of a restore: state in MB, CPU and wall time in seconds; and whether the table is right."""

    size_mb: float
    cpu_s: float
    took_s: float
    is_right: bool


def measure(*, short: bool) -> list[Figure]:
    """Store a table, then restore it twice by processes that know nothing of it."""
    found: list[Figure] = []
    with S3Server() as server, tempfile.TemporaryDirectory(prefix="dstl-") as name:
        folder = Path(name)
        server.create_bucket(BUCKET)
        with _service(server, folder / "stored") as service:
            base, state = store_table(service, folder, 2_000 if short else 200_000)
        for what, key_groups, goal in _RESTORES:
            wanted = {key: value for key, value in state.items() if key_groups.contains(int.from_bytes(key[:2], "big"))}
            with _service(server, folder / key_groups.to_text()) as service:
                cost = restored(service, folder / f"table-{key_groups.to_text()}", key_groups, base, wanted)
            found += [
                Figure(f"restore of {what}: state", cost.size_mb, "MB"),
                Figure(f"restore of {what}: per CPU second", cost.size_mb / cost.cpu_s, "MB/s", Goal(">=", goal)),
                Figure(f"restore of {what}: to the first read", cost.took_s, "s"),
                Figure(f"restore of {what}: tables that are right", int(cost.is_right), "tables", Goal("==", 1)),
            ]
    return found


def store_table(service: ServiceProcess, folder: Path, keys: int) -> tuple[CheckpointRef, State]:
    """Run a job until a snapshot of all its keys is in its newest checkpoint; return that, and the state."""
    client = ServiceClient(service.address, patience_s=60)
    chance, job, state = random.Random(1), JobDriver(client, max_parallelism=128), State()
    operator = OperatorInfo("op", 1, "{}", {})
    until = time.monotonic() + _WAIT_S
    while True:
        table, advance = _opened(client, folder / "worker", ALL_KEY_GROUPS, job.base)
        if advance.materialize and job.base is not None:
            hand_over_snapshot(table, client, job.name, job.operator, ALL_KEY_GROUPS, job.base)
        table.close()
        is_stored = len(state) >= keys and advance.materialized is not None and "index" in advance.materialized
        changes = {_key(chance): chance.randbytes(VALUE_BYTES) for _ in range(max(1, min(8_000, keys - len(state))))}
        state |= changes
        job.complete(
            job.write({**changes}),
            operators=[operator],
            materializations=[] if advance.materialized is None else [advance.materialized],
        )
        if is_stored:
            assert job.base is not None
            return job.base, state
        if time.monotonic() > until:
            log_tail = service.log()[-_LOG_TAIL_CHARS:]
            raise TimeoutError(f"no snapshot was stored within {_WAIT_S:g} s; the end of its log:\n{log_tail}")


def restored(
    service: ServiceProcess, folder: Path, key_groups: KeyGroupRange, base: CheckpointRef, wanted: State
) -> Restored:
    """Restore a table into an empty folder, and compare it with what it should have."""
    client = ServiceClient(service.address, patience_s=60)
    first = next(iter(wanted))
    begun_s, cpu_s = time.monotonic(), _cpu_s() + service.cpu_s()
    table, _ = _opened(client, folder, key_groups, base)
    found = table.get(first)
    cpu_s, took_s = _cpu_s() + service.cpu_s() - cpu_s, time.monotonic() - begun_s
    is_right = found == wanted[first] and dict(table.items()) == wanted
    table.close()
    client.close()
    return Restored(sum(len(key) + len(value) for key, value in wanted.items()) / 1e6, cpu_s, took_s, is_right)


def _opened(
    client: ServiceClient, folder: Path, key_groups: KeyGroupRange, base: CheckpointRef | None
) -> tuple[StateTable, Advance]:
    return open_advanced(folder, lambda table: advance_to_base(table, client, "job", "op", key_groups, base))


@contextmanager
def _service(server: S3Server, cache: Path) -> Iterator[ServiceProcess]:
    environment = {**server.env(), **_ALWAYS_DUE, "DSTL_CACHE_FOLDER": str(cache)}
    with ServiceProcess(f"s3://{BUCKET}", environment) as service:
        yield service


def _key(chance: random.Random) -> bytes:
    return chance.randrange(128).to_bytes(2, "big") + chance.randbytes(16)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
