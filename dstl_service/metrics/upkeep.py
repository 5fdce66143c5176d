"""The metrics of what a coordinator does behind checkpoints: compaction, deletion, collection of garbage."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dstl_service.metrics.buckets import SECONDS


class UpkeepMetrics:
    """Counts, sizes and ages by job."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.orphans = Gauge("dstl_orphans", "Orphans that the last collection left.", ["job"], registry=registry)
        self.orphans_deleted = Counter("dstl_orphans_deleted", "Orphans deleted.", ["job"], registry=registry)
        self.collections_failed = Counter(
            "dstl_collections_failed",
            "Collections of orphans that failed; the next round tries again.",
            ["job"],
            registry=registry,
        )
        self.collection_age = Gauge(
            "dstl_collection_success_age_seconds",
            "Time since orphans were last collected with success, or else since the collector was started.",
            ["job"],
            registry=registry,
        )
        self.log_bytes = Gauge(
            "dstl_log_bytes",
            "Stored log of an operator behind its bases and materializations.",
            ["job", "operator"],
            registry=registry,
        )
        self.table_bytes = Gauge(
            "dstl_table_bytes",
            "Bases and materializations of an operator: about the stored size of its table.",
            ["job", "operator"],
            registry=registry,
        )
        self.compactions = Counter("dstl_compactions", "Log compactions done.", ["job"], registry=registry)
        self.compactions_failed = Counter(
            "dstl_compactions_failed", "Log compactions that failed.", ["job"], registry=registry
        )
        self.compacted_bytes = Counter(
            "dstl_compacted_bytes", "Bytes of segments read by compactions.", ["job"], registry=registry
        )
        self.compaction_seconds = Histogram(
            "dstl_compaction_seconds", "Time of a log compaction.", buckets=SECONDS, registry=registry
        )
        self.subsumed = Counter(
            "dstl_checkpoints_subsumed", "Manifests of subsumed checkpoints deleted.", ["job"], registry=registry
        )
        self.subsumed_objects = Counter(
            "dstl_subsumed_objects_deleted",
            "Objects deleted that only subsumed checkpoints named.",
            ["job"],
            registry=registry,
        )
        self.waiting_deletions = Gauge(
            "dstl_subsumed_objects",
            "Truncation lag: objects that only subsumed checkpoints name and that wait for their deletion.",
            ["job"],
            registry=registry,
        )
