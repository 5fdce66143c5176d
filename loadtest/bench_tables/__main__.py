"""
``make bench-tables``: Flink's published tables again, the changelog on and off.

A real run records what checkpoints upload, how large they are and how long recovery takes. The service's own uploader
then makes 20,000 checkpoints of these sizes on a virtual clock, at a store of the profile `s3-standard`; a shorter real
run is beside it. Writes ``reports/bench-tables.json`` and ``reports/bench-tables.html``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from backend_client.service.client import ServiceClient
from loadtest.bench_service import line_of
from loadtest.bench_tables.cells import STORE, WAYS, Cell, Way, off_factor
from loadtest.bench_tables.measured import Durations, Measured, figures_of, histories_of
from loadtest.bench_tables.page import write_page
from loadtest.bench_tables.real_run import logged_ms, plain_files_ms
from loadtest.bench_tables.recording import LoggedJob, Recording, record, settings
from loadtest.bench_tables.recovery import ALWAYS_DUE, recovery_s, settle
from loadtest.bench_tables.simulation import FLINKS, ONE_HOST, Layout
from loadtest.bench_tables.workloads import SCALE, WORKLOADS
from tools.reporting.figures import Figure
from tools.reporting.target import TargetReport, chosen_options
from tools.servers.faults.proxy import FaultProxy
from tools.servers.s3_server import S3Server
from tools.servers.service.process import ServiceProcess

CHECKPOINTS, CHECKPOINTS_SHORT = 20_000, 60
_RECORDED = {"value-state": 1_000, "sliding-window": 360}
_RECORDED_SHORT = 48
_REAL_CHECKPOINTS: Mapping[Way, int] = {"on": 60, "off": 20}
_REAL_CHECKPOINTS_SHORT = 1
_RESTORES, _RESTORES_SHORT = 3, 1
_REAL_LAYOUT = Layout("two subtasks", 1, 2)
_STORE_SHORT = "same-zone"
_STORAGE = "s3://tables/job"


def measure(name: str, *, short: bool) -> Measured:
    """Record a workload, restore it in both forms, and make its checkpoints in real and in virtual time."""
    print(f"{name}: recording ...", flush=True)
    with S3Server() as server, tempfile.TemporaryDirectory(prefix="dstl-") as temporary:
        server.create_bucket("tables")
        folder = Path(temporary)
        with FaultProxy(server.endpoint_url, folder) as proxy:
            recording, recovery = _recorded(name, server, proxy, folder, short=short)
            print(f"{name}: in real time ...", flush=True)
            real = _in_real_time(recording, server, proxy, short=short)
    print(f"{name}: on the virtual clock ...", flush=True)
    return Measured(name, recording, recovery, real, _simulated(recording, name, short=short))


def _recorded(
    name: str, server: S3Server, proxy: FaultProxy, folder: Path, *, short: bool
) -> tuple[Recording, tuple[float, float]]:
    workload = WORKLOADS[name](1_000 if name == "value-state" else 60) if short else WORKLOADS[name]()
    checkpoints, times = (_RECORDED_SHORT, _RESTORES_SHORT) if short else (_RECORDED[name], _RESTORES)
    store = _STORE_SHORT if short else STORE
    with ServiceProcess(_STORAGE, {**server.env(), **settings(workload)}) as service:
        client = ServiceClient(service.address, patience_s=60)
        job = LoggedJob(client, folder / "worker")
        recording = record(workload, job, folder / "plain", checkpoints, server.data_dir, 50.0 if short else 1.0)
        on_s = recovery_s(server, proxy, store, _STORAGE, job, workload.table, folder / "on", times)
        service.restart(**ALWAYS_DUE)
        settle(job, workload)
        off_s = recovery_s(server, proxy, store, _STORAGE, job, workload.table, folder / "off", times)
        client.close()
    return recording, (on_s, off_s)


def _in_real_time(recording: Recording, server: S3Server, proxy: FaultProxy, *, short: bool) -> list[Durations]:
    store = _STORE_SHORT if short else STORE
    on, off = (
        Cell(recording, _REAL_LAYOUT, way, 1.0, 1.0, _REAL_CHECKPOINTS_SHORT if short else checkpoints)
        for way, checkpoints in _REAL_CHECKPOINTS.items()
    )
    return [
        Durations(on, logged_ms(server, proxy, store, on)),
        Durations(off, plain_files_ms(server, proxy, store, off)),
    ]


def _simulated(recording: Recording, name: str, *, short: bool) -> list[Durations]:
    """Run the cells in two processes."""
    checkpoints = CHECKPOINTS_SHORT if short else CHECKPOINTS
    factors = float(SCALE), off_factor(recording, name)
    cells = [Cell(recording, layout, way, *factors, checkpoints) for layout in (ONE_HOST, FLINKS) for way in WAYS]
    cells += [Cell(recording, _REAL_LAYOUT, way, 1.0, 1.0, checkpoints) for way in ("on", "off")]
    if short:
        return [Durations(cell, cell.durations_ms()) for cell in cells]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return [Durations(cell, found) for cell, found in zip(cells, pool.map(Cell.durations_ms, cells), strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit code."""
    names, short, strict = chosen_options("Flink's tables again.", list(WORKLOADS), arguments, "few checkpoints")
    report = TargetReport("bench-tables", strict=strict)
    figures: list[Figure] = []
    measured: list[Measured] = []
    exit_code = 0
    for name in names:
        measured.append(measure(name, short=short))
        found = figures_of(measured[-1])
        for figure in found:
            print(line_of(figure), flush=True)
        figures += found
        exit_code = report.write(figures, [one for each in measured for one in histories_of(each)])
    write_page(Path("reports/bench-tables.html"), measured, figures)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
