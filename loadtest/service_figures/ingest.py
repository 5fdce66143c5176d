"""
Figure 4: how fast change sets that are sent over a Unix socket become durable.

What the same machine does without the service is measured in the same run, in turn with it, for a disk's speed changes
from minute to minute: files of 10 MB, written and flushed one after the other, and PUTs of 10 MB by plain boto3 from as
many threads as the service has. All disks are warm: the first round of each is not counted. Everything runs on the same
processors: service, load and S3 server.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.report import Figure, Goal
from loadtest.service_figures.append_load import Load, run_load
from loadtest.stack.programs import stack_folder
from loadtest.stack.s3_server import S3Server
from loadtest.stack.service_process import ServiceProcess

BUCKET = "ingest"
OBJECT_BYTES = 10 * 1024 * 1024
"""The service's batch size, so that both sides write objects of the same size."""
LARGE_BYTES = 1024 * 1024
SMALL_BYTES = 4 * 1024
UPLOAD_THREADS = 5

DISK_SHARE_MIN = 0.6
S3_SHARE_MIN = 0.8
SMALL_APPENDS_PER_S_MIN = 4_000


@dataclass(slots=True)
class Sum:
    """What the counted rounds of one side come to."""

    megabytes: float = 0.0
    seconds: float = 0.0
    sets: int = 0
    cpu_s: float = 0.0

    @property
    def megabytes_per_s(self) -> float:
        """Throughput over all rounds."""
        return self.megabytes / self.seconds


def measure(*, short: bool) -> list[Figure]:
    """Measure on this disk, then on an S3 server."""
    return [*measure_disk(short=short), *measure_s3(short=short)]


def measure_disk(*, short: bool) -> list[Figure]:
    """Compare with plain files on the disk of the project's folder."""
    rounds, seconds = (1, 0.5) if short else (5, 2.0)
    with (
        tempfile.TemporaryDirectory(prefix="ingest-", dir=stack_folder()) as folder,
        ServiceProcess(Path(folder, "storage").as_uri()) as service,
    ):

        def clean() -> None:
            # What is kept would be written back to the disk while the next round is measured.
            for path in Path(folder, "storage").glob("lane-*/segments"):
                shutil.rmtree(path)

        def plain() -> float:
            return _write_files(Path(folder, "plain"), seconds)

        large = Load(LARGE_BYTES, sets=40, seconds=seconds)
        files, ours = _in_turn(rounds, seconds, plain, service, large, clean)
        small = _several(rounds, service, Load(SMALL_BYTES, sets=1_000, seconds=seconds), clean)
    return [
        Figure("disk, plain 10 MB files with fsync", files, "MB/s"),
        Figure("disk, 1 MB sets: durable", ours.megabytes_per_s, "MB/s"),
        Figure(
            "disk, 1 MB sets: share of plain files", ours.megabytes_per_s / files, "ratio", Goal(">=", DISK_SHARE_MIN)
        ),
        Figure("disk, 1 MB sets: CPU of the service", 1000 * ours.cpu_s / ours.megabytes, "s/GB"),
        Figure("disk, 4 KB sets: durable", small.sets / small.seconds, "1/s", Goal(">=", SMALL_APPENDS_PER_S_MIN)),
        Figure("disk, 4 KB sets: CPU of the service", 1000 * small.cpu_s / small.megabytes, "s/GB"),
        Figure("disk, 4 KB sets: CPU of the service per set", 1e6 * small.cpu_s / small.sets, "us"),
    ]


def measure_s3(*, short: bool) -> list[Figure]:
    """Compare with plain boto3 against the same server."""
    rounds, seconds = (1, 0.5) if short else (5, 3.0)
    with S3Server() as server:
        server.create_bucket(BUCKET)
        settings = {**server.env(), "DSTL_UPLOAD_THREADS": str(UPLOAD_THREADS)}
        with ServiceProcess(f"s3://{BUCKET}/storage", settings) as service, _plain_boto3(server, seconds) as plain:

            def clean() -> None:
                for path in (server.data_dir / BUCKET).glob("storage/lane-*/segments"):
                    shutil.rmtree(path)
                shutil.rmtree(server.data_dir / BUCKET / "plain", ignore_errors=True)

            large = Load(LARGE_BYTES, sets=100, seconds=seconds)
            theirs, ours = _in_turn(rounds, seconds, plain, service, large, clean)
    share = ours.megabytes_per_s / theirs
    return [
        Figure(f"S3, plain boto3 with {UPLOAD_THREADS} threads", theirs, "MB/s"),
        Figure("S3, 1 MB sets: durable", ours.megabytes_per_s, "MB/s"),
        Figure("S3, 1 MB sets: share of plain boto3", share, "ratio", Goal(">=", S3_SHARE_MIN)),
        Figure("S3, 1 MB sets: CPU of the service", 1000 * ours.cpu_s / ours.megabytes, "s/GB"),
    ]


def _in_turn(
    rounds: int,
    seconds: float,
    plain: Callable[[], float],
    service: ServiceProcess,
    load: Load,
    clean: Callable[[], None],
) -> tuple[float, Sum]:
    """Return the plain side's MB/s and the service's rounds; the sides take turns, and warm up first."""
    plain_megabytes = 0.0
    ours = Sum()
    for number in range(rounds + 1):
        megabytes = plain() * seconds
        clean()
        found = _one(service, load)
        clean()
        if number > 0:
            plain_megabytes += megabytes
            _add(ours, found)
    return plain_megabytes / (rounds * seconds), ours


def _several(rounds: int, service: ServiceProcess, load: Load, clean: Callable[[], None]) -> Sum:
    total = Sum()
    for number in range(rounds + 1):
        found = _one(service, load)
        clean()
        if number > 0:
            _add(total, found)
    return total


def _one(service: ServiceProcess, load: Load) -> Sum:
    cpu_s = service.cpu_s()
    outcome = run_load(str(service.socket_path), load)
    return Sum(outcome.megabytes, outcome.seconds, outcome.sets, service.cpu_s() - cpu_s)


def _add(total: Sum, found: Sum) -> None:
    total.megabytes += found.megabytes
    total.seconds += found.seconds
    total.sets += found.sets
    total.cpu_s += found.cpu_s


def _write_files(folder: Path, seconds: float) -> float:
    """Write and flush files one after the other; return MB/s."""
    data = os.urandom(OBJECT_BYTES)
    folder.mkdir()
    count = 0
    start_s = time.monotonic()
    while count == 0 or time.monotonic() < start_s + seconds:
        file = os.open(folder / str(count), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        count += 1
    spent_s = time.monotonic() - start_s
    shutil.rmtree(folder)
    return count * OBJECT_BYTES / 1e6 / spent_s


@contextmanager
def _plain_boto3(server: S3Server, seconds: float) -> Iterator[Callable[[], float]]:
    """Give a function that puts objects from UPLOAD_THREADS threads and returns MB/s; boto3 is as it comes."""
    data = os.urandom(OBJECT_BYTES)
    client = server.client()

    def put(thread: int, end_s: float) -> int:
        count = 0
        while count == 0 or time.monotonic() < end_s:
            client.put_object(Bucket=BUCKET, Key=f"plain/{thread}-{count}", Body=data)
            count += 1
        return count

    with ThreadPoolExecutor(UPLOAD_THREADS) as pool:

        def run() -> float:
            start_s = time.monotonic()
            threads = [pool.submit(put, thread, start_s + seconds) for thread in range(UPLOAD_THREADS)]
            counts: Sequence[int] = [thread.result() for thread in threads]
            return sum(counts) * OBJECT_BYTES / 1e6 / (time.monotonic() - start_s)

        yield run
    client.close()
