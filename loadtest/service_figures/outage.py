"""
Cost of 20 s without the object store: S3 answers 503 while tasks continue to append 200 change sets a second.

One job is within a long batch: its tasks append all the time, more than the service may hold during the outage, so that
they meet back-pressure. Another one completes a checkpoint a second, as far as the store allows. At the end both are
restored and compared with the appended sets.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef
from tools.reporting.figures import Figure, Goal
from tools.servers.faults.proxy import FaultProxy, Rule
from tools.servers.s3_server import S3Server
from tools.servers.service.job_driver import JobDriver
from tools.servers.service.process import ServiceProcess

APPENDS_PER_S = 200
TASKS = 20
SET_BYTES = 32 * 1024
BEFORE_S = 5.0
OUTAGE_S = 20.0
AFTER_S = 10.0
OUTAGE_SHORT_S = 4.0
AFTER_SHORT_S = 4.0
TICK_S = 1.0
PATIENCE_S = 120.0
IN_FLIGHT_BYTES_MAX = 100 * 1024 * 1024
"""The service's default."""
_SAMPLE_S = 0.05
_MB = 1e6


def measure(*, short: bool = False) -> list[Figure]:
    """Return the figures of lost and doubled sets and of waiting; `short` only shows that it works."""
    outage_s, after_s = (OUTAGE_SHORT_S, AFTER_SHORT_S) if short else (OUTAGE_S, AFTER_S)
    with tempfile.TemporaryDirectory(prefix="dstl-outage-") as folder, S3Server() as s3:
        s3.create_bucket("bucket")
        with (
            FaultProxy(s3.endpoint_url, Path(folder)) as proxy,
            ServiceProcess("s3://bucket/outage", s3.env(proxy.endpoint_url)) as service,
        ):
            return _measure(proxy, service, outage_s, after_s)


def _measure(proxy: FaultProxy, service: ServiceProcess, outage_s: float, after_s: float) -> list[Figure]:
    batch = JobDriver(ServiceClient(service.address, patience_s=PATIENCE_S), "batch")
    ticker = Ticker(JobDriver(ServiceClient(service.address, patience_s=PATIENCE_S), "ticker"))
    memory = MemoryWatch(service.pid)
    end_s = time.monotonic() + BEFORE_S + outage_s + after_s
    with ThreadPoolExecutor(TASKS + 2) as pool:
        watching = pool.submit(memory.run)
        ticking = pool.submit(ticker.run, end_s)
        tasks = [pool.submit(_append_until, batch, number, end_s) for number in range(TASKS)]
        time.sleep(BEFORE_S)
        proxy.set_rules(*(Rule("refuse", method=method) for method in ("PUT", "GET", "HEAD", "POST", "DELETE")))
        time.sleep(outage_s)
        refused = sum(proxy.befallen())
        proxy.set_rules()
        back_s = time.monotonic()
        appended = [item for task in tasks for item in task.result()]
        batch.complete([ref for ref, _ in appended])
        ticking.result()
        memory.stop.set()
        watching.result()
    resumed_s = next(done_s for done_s in ticker.done_s if done_s > back_s) - back_s
    lost, doubled = _compare([payload for _, payload in appended], batch.payloads())
    lost_ticks, doubled_ticks = _compare(ticker.payloads, ticker.job.payloads())
    refused_appends = service.metrics()["dstl_change_sets_refused_total"]
    limit_mb = IN_FLIGHT_BYTES_MAX / _MB
    return [
        Figure("change sets appended", len(appended) + len(ticker.payloads), ""),
        Figure("appends answered with back-pressure", refused_appends, ""),
        Figure("requests that S3 answered with 503", refused, "", Goal(">=", 1)),
        Figure("change sets lost", lost + lost_ticks, "", Goal("==", 0)),
        Figure("change sets doubled", doubled + doubled_ticks, "", Goal("==", 0)),
        Figure("checkpoint after the return of S3", resumed_s, "s", Goal("<=", 3.0)),
        Figure("memory (RSS) of the service before", memory.first_bytes / _MB, "MB"),
        Figure("memory (RSS) of the service, most", memory.most_bytes / _MB, "MB", Goal("<=", limit_mb + 150)),
    ]


class Ticker:
    """Completes checkpoints of one set each, one a second if possible."""

    def __init__(self, job: JobDriver) -> None:
        self.job = job
        self.payloads: list[bytes] = []
        self.done_s: list[float] = []

    def run(self, end_s: float) -> None:
        """Run until `end_s`, and complete the begun checkpoint."""
        while time.monotonic() < end_s:
            begun_s = time.monotonic()
            payload = _payload(0, self.job.next_id)
            self.job.complete([self.job.append(payload)])
            self.payloads.append(payload)
            self.done_s.append(time.monotonic())
            time.sleep(max(0.0, begun_s + TICK_S - time.monotonic()))


class MemoryWatch:
    """Records the memory of a process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.stop = threading.Event()
        self.first_bytes = self.most_bytes = self._process.memory_info().rss

    def run(self) -> None:
        """Record until stopped."""
        while not self.stop.wait(_SAMPLE_S):
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)


def _append_until(job: JobDriver, partition: int, end_s: float) -> list[tuple[ChangeSetRef, bytes]]:
    """Append one partition's sets at its share of the rate; after a wait, at full speed until it has caught up."""
    client = ServiceClient(job.client.address, patience_s=PATIENCE_S)
    begin_s = time.monotonic()
    appended = []
    for sqn in range(int((end_s - begin_s) * APPENDS_PER_S / TASKS)):
        time.sleep(max(0.0, begin_s + sqn * TASKS / APPENDS_PER_S - time.monotonic()))
        payload = _payload(partition, sqn)
        appended.append((job.append(payload, sqn, partition=partition, client=client), payload))
    client.close()
    return appended


def _payload(partition: int, sqn: int) -> bytes:
    head = b"%d/%d|" % (partition, sqn)
    return head + os.urandom(SET_BYTES - len(head))


def _compare(appended: list[bytes], restored: list[bytes]) -> tuple[int, int]:
    """Return how many sets are missing, and how many are surplus."""
    wanted, found = Counter(appended), Counter(restored)
    return (wanted - found).total(), (found - wanted).total()
