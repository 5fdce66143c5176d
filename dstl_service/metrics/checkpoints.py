"""The metrics of checkpoints."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from dstl_service.metrics.buckets import SECONDS


class CheckpointMetrics:
    """How many exist, and how long they took."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.checkpoints = Counter("dstl_checkpoints_completed", "Checkpoints that exist.", ["job"], registry=registry)
        self.checkpoint_seconds = Histogram(
            "dstl_checkpoint_seconds",
            "Time from the request to complete a checkpoint to its manifest.",
            buckets=SECONDS,
            registry=registry,
        )
