"""
Figure 4: speed at which change sets sent over a Unix socket become durable.

The same run also measures the machine without the service, in alternating rounds, since a disk's speed changes from
minute to minute: files of 10 MB, written and flushed one after the other, and PUTs of 10 MB by plain boto3 from as many
threads as the service has. The first round of each warms up and is not counted. Service, load and S3 server share the
same processors.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.service_figures.append_load import Load, Outcome, run_load
from tools.reporting.figures import Figure, Goal
from tools.servers.programs import stack_folder
from tools.servers.s3_server import S3Server
from tools.servers.service.process import ServiceProcess

BUCKET = "ingest"
OBJECT_BYTES = 10 * 1024 * 1024
"""The service's batch size: both sides write objects of the same size."""
LARGE_BYTES = 1024 * 1024
SMALL_BYTES = 4 * 1024
UPLOAD_THREADS = 5

DISK_SHARE_MIN = 0.6
S3_SHARE_MIN = 0.8
SMALL_APPENDS_PER_S_MIN = 4_000


@dataclass(frozen=True, slots=True)
class Pace:
    """Number of counted rounds, their seconds, and the number of warm-up rounds before them."""

    warm_ups: int
    rounds: int
    seconds: float


QUICK = Pace(0, 1, 0.3)


@dataclass(frozen=True, slots=True)
class Side:
    """The rounds of one load. Speeds are medians: a burst of other load on the machine spoils one round, not all."""

    outcomes: Sequence[Outcome]
    cpu_s: float

    @property
    def megabytes_per_s(self) -> float:
        """Durable megabytes per second."""
        return statistics.median(outcome.megabytes / outcome.seconds for outcome in self.outcomes)

    @property
    def sets_per_s(self) -> float:
        """Durable change sets per second."""
        return statistics.median(outcome.sets / outcome.seconds for outcome in self.outcomes)

    @property
    def cpu_s_per_gigabyte(self) -> float:
        """CPU time of the service per gigabyte."""
        return 1000 * self.cpu_s / sum(outcome.megabytes for outcome in self.outcomes)

    @property
    def cpu_us_per_set(self) -> float:
        """CPU time of the service per change set."""
        return 1e6 * self.cpu_s / sum(outcome.sets for outcome in self.outcomes)


def measure(*, short: bool) -> list[Figure]:
    """Measure on this disk, then on an S3 server."""
    return [*measure_disk(short=short), *measure_s3(short=short)]


def measure_disk(*, short: bool) -> list[Figure]:
    """Compare with plain files on the disk of the project's folder."""
    pace = QUICK if short else Pace(1, 5, 2.0)
    with (
        tempfile.TemporaryDirectory(prefix="ingest-", dir=stack_folder()) as folder,
        ServiceProcess(Path(folder, "storage").as_uri()) as service,
    ):

        def clean() -> None:
            # Remaining data would be written back to the disk during the next round.
            for path in Path(folder, "storage").glob("lane-*/segments"):
                shutil.rmtree(path, ignore_errors=True)

        def plain() -> float:
            return _write_files(Path(folder, "plain"), pace.seconds)

        large = Load(LARGE_BYTES, sets=40, seconds=pace.seconds)
        files, ours = _in_turn(pace, plain, service, large, clean)
        _, small = _in_turn(pace, None, service, Load(SMALL_BYTES, sets=1_000, seconds=pace.seconds), clean)
    return [
        Figure("disk, plain 10 MB files with fsync", files, "MB/s"),
        Figure("disk, 1 MB sets: durable", ours.megabytes_per_s, "MB/s"),
        Figure(
            "disk, 1 MB sets: share of plain files", ours.megabytes_per_s / files, "ratio", Goal(">=", DISK_SHARE_MIN)
        ),
        Figure("disk, 1 MB sets: CPU of the service", ours.cpu_s_per_gigabyte, "s/GB"),
        Figure("disk, 4 KB sets: durable", small.sets_per_s, "1/s", Goal(">=", SMALL_APPENDS_PER_S_MIN)),
        Figure("disk, 4 KB sets: CPU of the service", small.cpu_s_per_gigabyte, "s/GB"),
        Figure("disk, 4 KB sets: CPU of the service per set", small.cpu_us_per_set, "us"),
    ]


def measure_s3(*, short: bool) -> list[Figure]:
    """Compare with plain boto3 against the same server."""
    pace = QUICK if short else Pace(1, 5, 3.0)
    with S3Server() as server:
        server.create_bucket(BUCKET)
        settings = {**server.env(), "DSTL_UPLOAD_THREADS": str(UPLOAD_THREADS)}
        with ServiceProcess(f"s3://{BUCKET}/storage", settings) as service, _plain_boto3(server, pace.seconds) as plain:

            def clean() -> None:
                for path in (server.data_dir / BUCKET).glob("storage/lane-*/segments"):
                    shutil.rmtree(path, ignore_errors=True)
                shutil.rmtree(server.data_dir / BUCKET / "plain", ignore_errors=True)

            large = Load(LARGE_BYTES, sets=100, seconds=pace.seconds)
            theirs, ours = _in_turn(pace, plain, service, large, clean)
    share = ours.megabytes_per_s / theirs
    return [
        Figure(f"S3, plain boto3 with {UPLOAD_THREADS} threads", theirs, "MB/s"),
        Figure("S3, 1 MB sets: durable", ours.megabytes_per_s, "MB/s"),
        Figure("S3, 1 MB sets: share of plain boto3", share, "ratio", Goal(">=", S3_SHARE_MIN)),
        Figure("S3, 1 MB sets: CPU of the service", ours.cpu_s_per_gigabyte, "s/GB"),
    ]


def _in_turn(
    pace: Pace, plain: Callable[[], float] | None, service: ServiceProcess, load: Load, clean: Callable[[], None]
) -> tuple[float, Side]:
    """Return the plain side's MB/s and the service's rounds; the two take turns."""
    speeds, outcomes = [], []
    cpu_s = 0.0
    for number in range(pace.warm_ups + pace.rounds):
        speed = plain() if plain else 0.0
        clean()
        before_s = service.cpu_s()
        outcome = run_load(str(service.socket_path), load)
        spent_s = service.cpu_s() - before_s
        clean()
        if number >= pace.warm_ups:
            speeds.append(speed)
            outcomes.append(outcome)
            cpu_s += spent_s
    return statistics.median(speeds), Side(outcomes, cpu_s)


def _write_files(folder: Path, seconds: float) -> float:
    """Write and fsync files one after the other; return MB/s."""
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
    """Yield a function that puts objects from UPLOAD_THREADS threads and returns MB/s, with boto3's defaults."""
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
