"""Metrics of a coordinator's background work: compaction, deletion, garbage collection."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dstl_service.metrics.buckets import SECONDS


class BackgroundWorkMetrics:
    """Counts, sizes and ages by job."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.orphans = Gauge("dstl_orphans", "Orphans left by the last collection.", ["job"], registry=registry)
        self.orphans_deleted = Counter("dstl_orphans_deleted", "Orphans deleted.", ["job"], registry=registry)
        self.collections_failed = Counter(
            "dstl_collections_failed",
            "Collections of orphans that failed; the next round tries again.",
            ["job"],
            registry=registry,
        )
        self.collection_age = Gauge(
            "dstl_collection_success_age_seconds",
            "Time since the last successful collection of orphans, or else since the collector was started.",
            ["job"],
            registry=registry,
        )
        self.log_bytes = Gauge(
            "dstl_log_bytes",
            "Stored log of an operator after its bases and materializations.",
            ["job", "operator"],
            registry=registry,
        )
        self.table_bytes = Gauge(
            "dstl_table_bytes",
            "Bases and materializations of an operator: approximately the stored size of its table.",
            ["job", "operator"],
            registry=registry,
        )
        self.compactions = Counter("dstl_compactions", "Log compactions completed.", ["job"], registry=registry)
        self.compactions_failed = Counter(
            "dstl_compactions_failed", "Log compactions that failed.", ["job"], registry=registry
        )
        self.compacted_bytes = Counter(
            "dstl_compacted_bytes", "Bytes of segments read by compactions.", ["job"], registry=registry
        )
        self.compaction_seconds = Histogram(
            "dstl_compaction_seconds", "Duration of a log compaction.", buckets=SECONDS, registry=registry
        )
        self.subsumed = Counter(
            "dstl_checkpoints_subsumed", "Manifests of subsumed checkpoints deleted.", ["job"], registry=registry
        )
        self.subsumed_objects = Counter(
            "dstl_subsumed_objects_deleted",
            "Deleted objects that only subsumed checkpoints had named.",
            ["job"],
            registry=registry,
        )
        self.waiting_deletions = Gauge(
            "dstl_subsumed_objects",
            "Truncation lag: objects that only subsumed checkpoints name and that wait for deletion.",
            ["job"],
            registry=registry,
        )
