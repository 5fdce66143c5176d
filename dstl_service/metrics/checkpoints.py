"""Metrics of checkpoints."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dstl_service.metrics.buckets import SECONDS


class CheckpointMetrics:
    """Number and duration of completed checkpoints."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.checkpoints = Counter("dstl_checkpoints_completed", "Checkpoints completed.", ["job"], registry=registry)
        self.checkpoint_seconds = Histogram(
            "dstl_checkpoint_seconds",
            "Time from the request to complete a checkpoint until its manifest exists.",
            buckets=SECONDS,
            registry=registry,
        )
