"""The metrics of restores: how many run, and how far they are."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class RestoreMetrics:
    """Running restores, and the bytes that they are to send and have sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restores_running = Gauge(
            "dstl_restores_running", "Restores that are being answered.", ["job"], registry=registry
        )
        self.restore_planned_bytes = Counter(
            "dstl_restore_planned_bytes",
            "Bytes of segments and snapshots that restores begun so far were to send to tables.",
            ["job"],
            registry=registry,
        )
        self.restored_bytes = Counter(
            "dstl_restored_bytes", "Bytes of segments and snapshots sent to tables.", ["job"], registry=registry
        )
