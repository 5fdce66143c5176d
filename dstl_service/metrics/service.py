"""
Every metric of the service: its name, unit and labels, in Prometheus form at ``/metrics``.

Names follow Flink's changelog metrics where there is one (upload requests, failures, attempts, sizes, latencies, batch
sizes); units are in the names. Each service has a registry of its own, so that tests do not share counts.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dstl_service.metrics.batches import BatchMetrics
from dstl_service.metrics.downloads import DownloadFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SIZES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class ServiceMetrics:
    """
    The metrics of one service process.

    Args:
        in_flight_bytes: Asked when metrics are read: bytes received and not yet durable.
        queued_change_sets: Asked likewise: sets that are neither durable nor on their way.
        attempts_running: Asked likewise: attempts of uploads that run, late ones too.
        cache_hits: Asked likewise: segments restored from memory.
        cache_misses: Asked likewise: segments read from the store.
        cache_bytes: Asked likewise: bytes of segments in memory.
        downloads: Read likewise: what the cache of downloads reports.
    """

    def __init__(
        self,
        in_flight_bytes: Callable[[], float],
        queued_change_sets: Callable[[], float],
        attempts_running: Callable[[], float],
        cache_hits: Callable[[], float],
        cache_misses: Callable[[], float],
        cache_bytes: Callable[[], float],
        downloads: DownloadFigures,
    ) -> None:
        self.registry = CollectorRegistry()
        self.batches = BatchMetrics(self.registry)
        self.change_sets = Counter(
            "dstl_change_sets", "Change sets received, repeated ones included.", ["job"], registry=self.registry
        )
        self.change_set_bytes = Counter(
            "dstl_change_set_bytes", "Bytes of change sets received.", ["job"], registry=self.registry
        )
        self.refused = Counter(
            "dstl_change_sets_refused", "Change sets answered with back-pressure.", registry=self.registry
        )
        self.uploads = Counter("dstl_uploads", "Batches whose upload was begun.", ["job"], registry=self.registry)
        self.upload_failures = Counter(
            "dstl_upload_failures",
            "Batches whose every attempt failed; they are sent again.",
            ["job"],
            registry=self.registry,
        )
        self.upload_seconds = Histogram(
            "dstl_upload_seconds", "Time from a batch to its handles.", buckets=_SECONDS, registry=self.registry
        )
        self.upload_bytes = Histogram(
            "dstl_upload_bytes", "Size of a segment object.", buckets=_SIZES, registry=self.registry
        )
        self.batch_sets = Histogram(
            "dstl_batch_change_sets",
            "Change sets that share an object.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 1024),
            registry=self.registry,
        )
        self.upload_attempts = Histogram(
            "dstl_upload_attempts", "Attempts begun for an upload.", buckets=(1, 2, 3, 5, 10), registry=self.registry
        )
        self.winning_attempt = Histogram(
            "dstl_upload_winning_attempt",
            "Number of the attempt that stored the object; the first is 1.",
            buckets=(1, 2, 3, 5, 10),
            registry=self.registry,
        )
        self.loser_attempts = Counter(
            "dstl_upload_loser_attempts",
            "Attempts that failed, or ended after another one had stored the object.",
            ["job"],
            registry=self.registry,
        )
        self.checkpoints = Counter(
            "dstl_checkpoints_completed", "Checkpoints that exist.", ["job"], registry=self.registry
        )
        self.checkpoint_seconds = Histogram(
            "dstl_checkpoint_seconds",
            "Time from the request to complete a checkpoint to its manifest.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.restores_running = Gauge(
            "dstl_restores_running", "Restores that are being answered.", ["job"], registry=self.registry
        )
        self.restore_planned_bytes = Counter(
            "dstl_restore_planned_bytes",
            "Bytes of segments and snapshots that restores begun so far were to send to tables.",
            ["job"],
            registry=self.registry,
        )
        self.restored_bytes = Counter(
            "dstl_restored_bytes", "Bytes of segments and snapshots sent to tables.", ["job"], registry=self.registry
        )
        self.orphans = Gauge("dstl_orphans", "Orphans that the last collection left.", ["job"], registry=self.registry)
        self.orphans_deleted = Counter("dstl_orphans_deleted", "Orphans deleted.", ["job"], registry=self.registry)
        self.collections_failed = Counter(
            "dstl_collections_failed",
            "Collections of orphans that failed; the next round tries again.",
            ["job"],
            registry=self.registry,
        )
        self.collection_age = Gauge(
            "dstl_collection_success_age_seconds",
            "Time since orphans were last collected with success, or else since the collector was started.",
            ["job"],
            registry=self.registry,
        )
        self.log_bytes = Gauge(
            "dstl_log_bytes",
            "Stored log of an operator behind its bases and materializations.",
            ["job", "operator"],
            registry=self.registry,
        )
        self.table_bytes = Gauge(
            "dstl_table_bytes",
            "Bases and materializations of an operator: about the stored size of its table.",
            ["job", "operator"],
            registry=self.registry,
        )
        self.compactions = Counter("dstl_compactions", "Log compactions done.", ["job"], registry=self.registry)
        self.compactions_failed = Counter(
            "dstl_compactions_failed", "Log compactions that failed.", ["job"], registry=self.registry
        )
        self.compacted_bytes = Counter(
            "dstl_compacted_bytes", "Bytes of segments read by compactions.", ["job"], registry=self.registry
        )
        self.compaction_seconds = Histogram(
            "dstl_compaction_seconds", "Time of a log compaction.", buckets=_SECONDS, registry=self.registry
        )
        self.subsumed = Counter(
            "dstl_checkpoints_subsumed", "Manifests of subsumed checkpoints deleted.", ["job"], registry=self.registry
        )
        self.subsumed_objects = Counter(
            "dstl_subsumed_objects_deleted",
            "Objects deleted that only subsumed checkpoints named.",
            ["job"],
            registry=self.registry,
        )
        self.waiting_deletions = Gauge(
            "dstl_subsumed_objects",
            "Truncation lag: objects that only subsumed checkpoints name and that wait for their deletion.",
            ["job"],
            registry=self.registry,
        )
        for name, text, ask in (
            (
                "dstl_in_flight_bytes",
                "Bytes that arrive, are not durable, or are held by attempts.",
                in_flight_bytes,
            ),
            ("dstl_queued_change_sets", "Change sets that wait for an upload to begin.", queued_change_sets),
            ("dstl_upload_attempts_running", "Attempts that run, late ones too.", attempts_running),
            ("dstl_cache_hits", "Segments restored from memory.", cache_hits),
            ("dstl_cache_misses", "Segments restored from the store or from downloads.", cache_misses),
            ("dstl_cache_bytes", "Bytes of segments in memory.", cache_bytes),
            ("dstl_download_cache_hits", "Reads that a download on disk or on its way served.", lambda: downloads.hits),
            ("dstl_download_cache_misses", "Objects downloaded from the store.", lambda: downloads.misses),
            ("dstl_download_cache_bytes", "Bytes of downloads on disk.", lambda: downloads.bytes_kept),
            ("dstl_download_cache_failures", "Downloads that the disk lost or refused.", lambda: downloads.failures),
        ):
            Gauge(name, text, registry=self.registry).set_function(ask)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self.registry)
