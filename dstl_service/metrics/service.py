"""
All metrics of the service, in Prometheus' format at ``/metrics``.

Names follow Flink's changelog metrics where one exists (upload requests, failures, attempts, sizes, latencies, batch
sizes); units are in the names. Each service has a registry of its own, so tests do not share counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from dstl_service.metrics.background_work import BackgroundWorkMetrics
from dstl_service.metrics.batches import BatchMetrics
from dstl_service.metrics.checkpoints import CheckpointMetrics
from dstl_service.metrics.downloads import DownloadFigures
from dstl_service.metrics.intake import IntakeMetrics
from dstl_service.metrics.restores import RestoreMetrics


class CacheFigures(Protocol):
    """Figures of the in-memory segment cache."""

    hits: int
    """Number of segments restored from memory."""
    misses: int
    """Number of segments read from the store or from downloads."""
    bytes_kept: int
    """Bytes of segments in memory."""


class _Registry(CollectorRegistry):
    """A registry that tells its metrics."""

    def __init__(self) -> None:
        self.metrics: list[MetricWrapperBase] = []
        super().__init__()

    def register(self, collector: Collector) -> None:
        """Add a collector; called by every metric when it is made."""
        super().register(collector)
        if isinstance(collector, MetricWrapperBase):
            self.metrics.append(collector)


class ServiceMetrics:
    """The metrics of one service process, by area; each part gets only its own area."""

    def __init__(self) -> None:
        self.registry = _Registry()
        self.batches = BatchMetrics(self.registry)
        self.intake = IntakeMetrics(self.registry)
        self.checkpoints = CheckpointMetrics(self.registry)
        self.restores = RestoreMetrics(self.registry)
        self.background_work = BackgroundWorkMetrics(self.registry)

    def watch(
        self,
        in_flight_bytes: Callable[[], float],
        queued_change_sets: Callable[[], float],
        attempts_running: Callable[[], float],
        cache: CacheFigures,
        downloads: DownloadFigures,
    ) -> None:
        """
        Register gauges whose values are computed when metrics are read; call once.

        Args:
            in_flight_bytes: Bytes in flight, plus bytes reserved for arriving bodies.
            queued_change_sets: Number of sets that are neither durable nor being uploaded.
            attempts_running: Number of running upload attempts, late ones included.
            cache: Figures of the in-memory segment cache.
            downloads: Figures of the download cache.
        """
        for name, text, ask in (
            (
                "dstl_in_flight_bytes",
                "Bytes reserved for arriving bodies, not yet durable, or held by upload attempts.",
                in_flight_bytes,
            ),
            ("dstl_queued_change_sets", "Change sets whose upload has not begun.", queued_change_sets),
            ("dstl_upload_attempts_running", "Running upload attempts, late ones included.", attempts_running),
            ("dstl_cache_hits", "Segments restored from memory.", lambda: cache.hits),
            ("dstl_cache_misses", "Segments restored from the store or from downloads.", lambda: cache.misses),
            ("dstl_cache_bytes", "Bytes of segments in memory.", lambda: cache.bytes_kept),
            ("dstl_download_cache_hits", "Reads served by a finished or running download.", lambda: downloads.hits),
            ("dstl_download_cache_misses", "Objects downloaded from the store.", lambda: downloads.misses),
            ("dstl_download_cache_bytes", "Bytes of downloads on disk.", lambda: downloads.bytes_kept),
            ("dstl_download_cache_failures", "Downloads that failed on the local disk.", lambda: downloads.failures),
        ):
            Gauge(name, text, registry=self.registry).set_function(ask)

    def forget(self, jobs: Collection[str]) -> None:
        """Remove the values of jobs that are no longer served here; costs as much as `render`."""
        for metric in self.registry.metrics:
            samples = [sample for family in metric.collect() for sample in family.samples]
            for labels in {tuple(it.labels.values()) for it in samples if it.labels.get("job") in jobs}:
                with suppress(KeyError, ValueError):  # of a bucket, or removed with another sample
                    metric.remove(*labels)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
