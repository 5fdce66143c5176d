"""Metrics of change sets from arrival to durability."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dstl_service.metrics.buckets import SECONDS

_SIZES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)


class IntakeMetrics:
    """Counts of change sets and uploads; sizes and durations of uploads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.change_sets = Counter(
            "dstl_change_sets", "Change sets received, repeated ones included.", ["job"], registry=registry
        )
        self.change_set_bytes = Counter(
            "dstl_change_set_bytes", "Bytes of change sets received.", ["job"], registry=registry
        )
        self.refused = Counter(
            "dstl_change_sets_refused", "Change sets answered with back-pressure.", registry=registry
        )
        self.uploads = Counter("dstl_uploads", "Batches whose upload began.", ["job"], registry=registry)
        self.upload_failures = Counter(
            "dstl_upload_failures",
            "Batches whose upload failed; they are uploaded again.",
            ["job"],
            registry=registry,
        )
        self.upload_seconds = Histogram(
            "dstl_upload_seconds", "Time from a batch to its handles.", buckets=SECONDS, registry=registry
        )
        self.upload_bytes = Histogram(
            "dstl_upload_bytes", "Size of a segment object.", buckets=_SIZES, registry=registry
        )
        self.batch_sets = Histogram(
            "dstl_batch_change_sets",
            "Change sets per segment object.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 1024),
            registry=registry,
        )
        self.upload_attempts = Histogram(
            "dstl_upload_attempts", "Attempts begun per upload.", buckets=(1, 2, 3, 5, 10), registry=registry
        )
        self.winning_attempt = Histogram(
            "dstl_upload_winning_attempt",
            "Number of the attempt that stored the object; the first is 1.",
            buckets=(1, 2, 3, 5, 10),
            registry=registry,
        )
        self.hedges = Counter(
            "dstl_upload_hedges",
            "Second attempts that began early, because the first one took longer than most.",
            ["job"],
            registry=registry,
        )
        self.loser_attempts = Counter(
            "dstl_upload_loser_attempts",
            "Attempts that failed, or ended after another one had stored the object.",
            ["job"],
            registry=registry,
        )

    def stored(self, job: str, seconds: float, size_bytes: int, *, attempts: int, hedges: int, winner: int) -> None:
        """Observe an upload that has stored its object."""
        self.upload_seconds.observe(seconds)
        self.upload_bytes.observe(size_bytes)
        self.upload_attempts.observe(attempts)
        self.winning_attempt.observe(winner)
        self.hedges.labels(job).inc(hedges)
