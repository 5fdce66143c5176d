"""Metrics of restores: how many run, and their progress."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class RestoreMetrics:
    """Running restores, and bytes planned and sent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.restores_running = Gauge(
            "dstl_restores_running", "Restores that are being answered.", ["job"], registry=registry
        )
        self.restore_planned_bytes = Counter(
            "dstl_restore_planned_bytes",
            "Bytes of segments and snapshots that begun restores planned to send to tables.",
            ["job"],
            registry=registry,
        )
        self.restored_bytes = Counter(
            "dstl_restored_bytes", "Bytes of segments and snapshots sent to tables.", ["job"], registry=registry
        )
        self.copied_bytes = Counter(
            "dstl_copied_bytes",
            "Bytes of segments and snapshots sent to copies of tables, which standbys keep.",
            ["job"],
            registry=registry,
        )
