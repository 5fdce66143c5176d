"""
Every metric of the service: its name, unit and labels, in Prometheus form at ``/metrics``.

Names follow Flink's changelog metrics where there is one (upload requests, failures, attempts, sizes, latencies, batch
sizes); units are in the names. Each service has a registry of its own, so that tests do not share counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dstl_service.metrics.batches import BatchMetrics
from dstl_service.metrics.checkpoints import CheckpointMetrics
from dstl_service.metrics.downloads import DownloadFigures
from dstl_service.metrics.intake import IntakeMetrics
from dstl_service.metrics.restores import RestoreMetrics
from dstl_service.metrics.upkeep import UpkeepMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


class CacheFigures(Protocol):
    """What the cache of segments in memory tells of itself."""

    @property
    def hits(self) -> int:
        """Segments restored from memory."""

    @property
    def misses(self) -> int:
        """Segments read from elsewhere."""

    @property
    def bytes_kept(self) -> int:
        """Bytes of segments in memory."""


class ServiceMetrics:
    """The metrics of one service process, by area; each part gets its own area only."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.batches = BatchMetrics(self.registry)
        self.intake = IntakeMetrics(self.registry)
        self.checkpoints = CheckpointMetrics(self.registry)
        self.restores = RestoreMetrics(self.registry)
        self.upkeep = UpkeepMetrics(self.registry)

    def watch(
        self,
        in_flight_bytes: Callable[[], float],
        queued_change_sets: Callable[[], float],
        attempts_running: Callable[[], float],
        cache: CacheFigures,
        downloads: DownloadFigures,
    ) -> None:
        """
        Show what is asked for when metrics are read; called once.

        Args:
            in_flight_bytes: Bytes received and not yet durable.
            queued_change_sets: Sets that are neither durable nor on their way.
            attempts_running: Attempts of uploads that run, late ones too.
            cache: What the cache of segments in memory reports.
            downloads: What the cache of downloads reports.
        """
        for name, text, ask in (
            (
                "dstl_in_flight_bytes",
                "Bytes that arrive, are not durable, or are held by attempts.",
                in_flight_bytes,
            ),
            ("dstl_queued_change_sets", "Change sets that wait for an upload to begin.", queued_change_sets),
            ("dstl_upload_attempts_running", "Attempts that run, late ones too.", attempts_running),
            ("dstl_cache_hits", "Segments restored from memory.", lambda: cache.hits),
            ("dstl_cache_misses", "Segments restored from the store or from downloads.", lambda: cache.misses),
            ("dstl_cache_bytes", "Bytes of segments in memory.", lambda: cache.bytes_kept),
            ("dstl_download_cache_hits", "Reads that a download on disk or on its way served.", lambda: downloads.hits),
            ("dstl_download_cache_misses", "Objects downloaded from the store.", lambda: downloads.misses),
            ("dstl_download_cache_bytes", "Bytes of downloads on disk.", lambda: downloads.bytes_kept),
            ("dstl_download_cache_failures", "Downloads that the disk lost or refused.", lambda: downloads.failures),
        ):
            Gauge(name, text, registry=self.registry).set_function(ask)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self.registry)
