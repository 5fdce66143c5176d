"""Metrics of materialization: counts of what was done, and gauges that show a stuck one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_GAUGES = {
    "materialization_log_bytes": "Log of this host's tables since their last materialization.",
    "materialization_table_bytes": "Size of this host's tables when they were last materialized.",
    "materializations_running": "Snapshots that are being stored.",
    "materialization_running_seconds": "Time for which the oldest running snapshot is being stored.",
    "materialization_success_age_seconds": "Time since the last success, of the table with the longest.",
    "materialization_consecutive_failures": "Consecutive failures, of the table with most.",
}

GaugeValues = dict[tuple[str, str], dict[str, float]]
"""The value of each gauge, by (job, operator)."""


class MaterializationMetrics:
    """Counters and gauges of one service process."""

    def __init__(self, registry: CollectorRegistry, gauges: Callable[[], GaugeValues]) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dstl_{name}", text, ["job", "operator", *labels], registry=registry)

        self.started = counter("materializations_started", "Snapshots whose upload began.")
        self.completed = counter("materializations_completed", "Snapshots stored.")
        self.failed = counter("materializations_failed", "Snapshots that could not be taken or stored.")
        self.damaged = counter(
            "tables_damaged", "Snapshots not stored because the local disk had damaged the table's files."
        )
        self.skipped = counter("materializations_skipped", "Materializations due but not needed, or not begun.")
        self.failures_reported = counter("materialization_failures_reported", "Tables that failed too often in a row.")
        self.triggered = counter("materializations_triggered", "Snapshots requested, by reason.", "trigger")
        self.named = counter("materializations_named", "Materializations that checkpoints took into their state.")
        self.refused = Counter(
            "dstl_materializations_refused",
            "Materializations refused because they did not belong to a checkpoint's state.",
            ["job"],
            registry=registry,
        )
        self.uploaded_bytes = counter("materialization_uploaded_bytes", "Bytes of snapshots uploaded to the store.")
        self.reused_bytes = counter("materialization_reused_bytes", "Bytes of snapshots that the store had already.")
        self.seconds = Histogram(
            "dstl_materialization_seconds", "Time to store a snapshot.", buckets=_SECONDS, registry=registry
        )
        registry.register(_Gauges(gauges))
        self._by_operator = (
            self.started,
            self.completed,
            self.failed,
            self.damaged,
            self.skipped,
            self.triggered,
            self.failures_reported,
            self.named,
            self.uploaded_bytes,
            self.reused_bytes,
        )

    def forget(self, operators: AbstractSet[tuple[str, ...]]) -> None:
        """Remove the counts of operators, given with their jobs: callers may name any number of them."""
        for metric in self._by_operator if operators else ():
            shown = {tuple(sample.labels.values()) for family in metric.collect() for sample in family.samples}
            for labels in shown:
                if labels[:2] in operators:
                    metric.remove(*labels)


class _Gauges(Collector):
    def __init__(self, ask: Callable[[], GaugeValues]) -> None:
        self._ask = ask

    def collect(self) -> Iterable[GaugeMetricFamily]:
        values = self._ask()
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"dstl_{name}", text, labels=["job", "operator"])
            for labels, found in sorted(values.items()):
                family.add_metric(labels, found[name])
            yield family
