"""
``make bench-scale``: how latency, manifests and costs grow from 50 to 10,000 partitions, 50 on each host.

Latencies come from the service's own uploader on a virtual clock at a store of the profile `s3-standard`, sizes from
the service's own encoding, objects per checkpoint from a service at a real S3 server; prices are S3's list prices.
Writes ``reports/bench-scale.json`` and ``reports/bench-scale.html``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dstl_service.uploads.settings import UploadSettings
from loadtest.bench_scale.cost import file_per_partition, shared_objects
from loadtest.bench_scale.latency import checkpoint_latencies_ms
from loadtest.bench_scale.manifests import PARTITIONS_PER_HOST, SET_BYTES, hosts_of, manifest_sizes
from loadtest.bench_service import line_of
from loadtest.service_figures.objects import BUCKET, count_objects, run_checkpoints
from tools.reporting.figures import Figure, Goal, percentile
from tools.reporting.page import HtmlReport
from tools.reporting.target import TargetReport, is_set
from tools.servers.faults.store_profiles import PROFILES
from tools.servers.s3_server import S3Server
from tools.servers.service.process import ServiceProcess

PARTITIONS = (50, 200, 4_000, 10_000)
_UPLOADS, _UPLOADS_SHORT = 40_000, 2_000
_MEASURED_CHECKPOINTS = 40
_SEED = 15


def objects_per_checkpoint() -> float:
    """Return the number of objects that a service of one host stores per checkpoint, counted at an S3 server."""
    with S3Server() as server:
        server.create_bucket(BUCKET)
        with ServiceProcess(f"s3://{BUCKET}", server.env()) as service:
            run_checkpoints(service.address, _MEASURED_CHECKPOINTS, 0.2)
        return count_objects(server) / _MEASURED_CHECKPOINTS


def measure(stored: float, *, short: bool) -> list[Figure]:
    """
    Return the figures of all sizes.

    Args:
        stored: Objects per checkpoint of one host, manifest included.
        short: Few checkpoints, and not the largest sizes.
    """
    figures = [Figure("objects per checkpoint of one host, counted", stored, "objects", Goal("<=", 2.2))]
    for partitions in PARTITIONS[: 2 if short else None]:
        figures += _figures(partitions, stored, _UPLOADS_SHORT if short else _UPLOADS)
    return figures


def _figures(partitions: int, stored: float, uploads: int) -> list[Figure]:
    hosts, sizes = hosts_of(partitions), manifest_sizes(partitions)
    name = f"{partitions} partitions on {hosts} hosts"
    found = checkpoint_latencies_ms(
        PROFILES["s3-standard"],
        hosts,
        SET_BYTES * PARTITIONS_PER_HOST,
        sizes.delta,
        max(100, uploads // hosts),
        _SEED,
        UploadSettings(),
    )
    ours, theirs = shared_objects(partitions, 1.0, stored - 1, 1), file_per_partition(partitions, 1.0)
    return [
        Figure(f"{name}: checkpoint p50", percentile(found, 50), "ms"),
        Figure(f"{name}: checkpoint p99", percentile(found, 99), "ms"),
        Figure(f"{name}: manifest", sizes.delta / 1e3, "kB"),
        Figure(f"{name}: complete manifest, every 20th", sizes.complete / 1e3, "kB"),
        Figure(f"{name}: PUTs a day at a batch a second", ours.puts / 1e6, "million"),
        Figure(f"{name}: PUTs a day, one file per partition", theirs.puts / 1e6, "million"),
        Figure(f"{name}: requests a day", ours.dollars, "$"),
        Figure(f"{name}: requests a day, one file per partition", theirs.dollars, "$"),
        Figure(f"{name}: fewer PUTs than one file per partition", theirs.puts / ours.puts, "x"),
    ]


def main() -> int:
    """Measure and report; return the exit code."""
    report = TargetReport("bench-scale")
    figures = measure(objects_per_checkpoint(), short=is_set("SHORT"))
    for figure in figures:
        print(line_of(figure))
    page = HtmlReport("Scale", "Latency, manifests and costs by the number of hosts and partitions.")
    page.add_text("Prices are S3's list prices per request; bytes stored and moved are not part of them.")
    page.add_figures(figures)
    page.write(Path("reports/bench-scale.html"))
    return report.write(figures)


if __name__ == "__main__":
    sys.exit(main())
