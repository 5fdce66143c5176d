"""
What a table restores from, with the changelog and without: a snapshot with a log, and a snapshot without.

New service processes without any local copy restore the table from the S3 server behind the proxy, up to the first read
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from loadtest.bench_tables.recording import LoggedJob
from loadtest.bench_tables.workloads import KEY_GROUPS, Workload
from loadtest.service_figures.restore import restored
from tools.servers.faults.proxy import FaultProxy
from tools.servers.s3_server import S3Server
from tools.servers.service.process import ServiceProcess

ALWAYS_DUE = {
    "DSTL_MATERIALIZATION_LOG_FLOOR_BYTES": "1",
    "DSTL_MATERIALIZATION_LOG_RATIO": "0",
    "DSTL_MATERIALIZATION_INTERVAL_S": "1",
    "DSTL_COMPACTION_ENABLED": "false",
}
"""Settings with which a snapshot is stored whenever there is any log."""
_SEED = 7
_PATIENCE_S = 60.0
_PAUSE_S = 0.05


class WrongTableError(Exception):
    """A restored table is not what was written."""


def recovery_s(
    server: S3Server,
    proxy: FaultProxy,
    store: str,
    storage: str,
    job: LoggedJob,
    table: dict[bytes, bytes],
    folder: Path,
    times: int,
) -> float:
    """
    Return the median time to restore the newest checkpoint, up to the first read of a key.

    Raises:
        WrongTableError: A restored table differs from `table`.
    """
    assert job.job.base is not None
    took_s = []
    for number in range(times):
        proxy.set_store(store, _SEED + number)
        environment = {**server.env(proxy.endpoint_url), "DSTL_CACHE_FOLDER": str(folder / f"cache-{number}")}
        with ServiceProcess(storage, environment) as service:
            found = restored(service, folder / f"table-{number}", KEY_GROUPS, job.job.base, table)
        if not found.is_right:
            raise WrongTableError(f"the table restored from {job.job.base.to_text()} is not what was written")
        took_s.append(found.took_s)
    return statistics.median(took_s)


def settle(job: LoggedJob, workload: Workload) -> None:
    """
    Checkpoint until the newest one names a new snapshot; only few changes of the log come after it.

    Raises:
        TimeoutError: No snapshot was stored; the service must have the settings `ALWAYS_DUE`.
    """
    until_s = time.monotonic() + _PATIENCE_S
    job.is_stored = False
    while not job.is_stored:
        if time.monotonic() > until_s:
            raise TimeoutError(f"no snapshot was stored within {_PATIENCE_S:g} s")
        job.checkpoint(workload.changes())
        time.sleep(_PAUSE_S)
