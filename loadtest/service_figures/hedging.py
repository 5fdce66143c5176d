"""
Effect of hedged attempts on the slowest persists: one PUT in a hundred takes five seconds longer.

Several jobs persist in parallel through the fault proxy, each its own objects; once with the service's defaults, once
with a single attempt without a short timeout.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backend_client.service.client import ServiceClient
from tools.reporting.figures import Figure, Goal, percentile
from tools.servers.faults.proxy import FaultProxy, Rule
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

DELAY_S = 5.0
ONE_IN = 100
SET_BYTES = 4096
JOBS = 8
PERSISTS = 1_600
PERSISTS_SHORT = 320
WITHOUT_HEDGING = {"DSTL_UPLOAD_ATTEMPTS_MAX": "1", "DSTL_UPLOAD_TIMEOUT_MS": "60000"}


def measure(*, short: bool = False) -> list[Figure]:
    """Return p50, p99 and p99.9 of persist, with and without hedging; `short` only shows that it works."""
    persists = PERSISTS_SHORT if short else PERSISTS
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="dstl-hedging-") as folder, S3Server() as s3:
        s3.create_bucket("bucket")
        with FaultProxy(s3.endpoint_url, Path(folder)) as proxy:
            environment = s3.env(proxy.endpoint_url)
            for name, goal, settings in (
                ("hedged", Goal("<=", 1.5), {}),
                ("not hedged", Goal(">=", DELAY_S), WITHOUT_HEDGING),
            ):
                proxy.set_rules(Rule("delay", path=r"/segments/", every=ONE_IN, seconds=DELAY_S))
                latencies = _persist_latencies(f"s3://bucket/{name[:3]}", {**environment, **settings}, persists)
                (delayed,) = proxy.befallen()
                figures += [
                    Figure(f"persist p50, {name}", percentile(latencies, 50), "s"),
                    Figure(f"persist p99, {name}", percentile(latencies, 99), "s"),
                    Figure(f"persist p99.9, {name}", percentile(latencies, 99.9), "s", goal),
                    Figure(f"persists, {name}", len(latencies), ""),
                    Figure(f"PUTs delayed by {DELAY_S:.0f} s, {name}", delayed, "", Goal(">=", persists // ONE_IN)),
                ]
    return figures


def _persist_latencies(storage: str, environment: Mapping[str, str], persists: int) -> list[float]:
    with ServiceProcess(storage, environment) as service, ThreadPoolExecutor(JOBS) as pool:
        jobs = [JobDriver(ServiceClient(service.address), f"job-{number}") for number in range(JOBS)]
        parts = pool.map(lambda job: _persist_often(job, persists // JOBS), jobs)
        return [latency for part in parts for latency in part]


def _persist_often(job: JobDriver, persists: int) -> list[float]:
    payload = os.urandom(SET_BYTES)
    latencies = []
    for sqn in range(persists):
        ref = job.append(payload, sqn)
        began_s = time.monotonic()
        job.persist(ref)
        latencies.append(time.monotonic() - began_s)
    job.client.close()
    return latencies
