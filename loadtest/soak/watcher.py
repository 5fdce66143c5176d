"""Takes samples of a running query: memory of its processes, objects in its bucket, files on its local disk."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pyspark.sql import SparkSession

from backend_client import BatchProgress, ChangelogStateBackend
from loadtest.bench.measuring import sidecar_pid
from loadtest.soak.samples import Sample

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class Watcher:
    """
    Takes a sample every few batches.

    Args:
        spark: The query's session.
        backend: The query's backend.
        client: For the S3 server.
        bucket: The storage's bucket.
        folders: Hold all local files of the query.
        every: Number of batches per sample, >= 1.
    """

    def __init__(
        self,
        spark: SparkSession,
        backend: ChangelogStateBackend,
        client: S3Client,
        bucket: str,
        folders: Sequence[Path],
        every: int,
    ) -> None:
        self.samples: list[Sample] = []
        self._jvm: Any = spark._jvm.java.lang  # type: ignore[union-attr]  # noqa: SLF001 - nothing else asks a JVM
        self._backend = backend
        self._client = client
        self._bucket = bucket
        self._folders = folders
        self._every = every
        self._latencies_ms: list[float] = []

    def observe(self, progress: BatchProgress) -> None:
        """Note a finished batch; take a sample if it is due."""
        self._latencies_ms.append(progress.total_ms)
        if len(self._latencies_ms) >= self._every:
            self.samples.append(self._sample(progress.batch_id))
            self._latencies_ms.clear()

    def _sample(self, batch: int) -> Sample:
        sizes = list(self._object_sizes())
        return Sample(
            batch,
            statistics.median(self._latencies_ms),
            memory(sidecar_pid(self._backend)),
            self._heap_bytes(),
            len(sizes),
            sum(sizes),
            sum(map(disk_bytes, self._folders)),
        )

    def _heap_bytes(self) -> int:
        """Collect garbage, and return what the JVM's heap holds: its resident memory only says how large it was."""
        self._jvm.System.gc()
        runtime = self._jvm.Runtime.getRuntime()
        return int(runtime.totalMemory() - runtime.freeMemory())

    def _object_sizes(self) -> Iterator[int]:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket):
            for item in page.get("Contents", ()):
                yield item["Size"]


def memory(sidecar: int) -> dict[str, int]:
    """
    Return the resident memory in bytes of the driver, its JVM, all workers together, and the sidecar.

    Args:
        sidecar: The sidecar's process id.
    """
    driver = psutil.Process()
    [jvm] = [process for process in driver.children() if process.name() == "java"]
    return {
        "the driver": driver.memory_info().rss,
        "the JVM": jvm.memory_info().rss,
        "the workers": sum(_resident(process) for process in jvm.children(recursive=True) if process.pid != sidecar),
        "the sidecar": _resident(psutil.Process(sidecar)),
    }


def disk_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; files that are deleted meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # a worker that has just ended
        return 0
