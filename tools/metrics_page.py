"""Writes docs/metrics.md from the registry of a service: names, labels and meanings have one place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from dstl_service.metrics.downloads import DownloadFigures
from dstl_service.metrics.materialization import MaterializationMetrics
from dstl_service.metrics.service import ServiceMetrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
_INTRODUCTION = """\
# Metrics

This page is written by `make metrics-page` from the declarations in the code; a test compares it.

A service shows these at `/metrics` in Prometheus' form; what to watch is in [operations.md](operations.md).
Units are in the names. A histogram `NAME` has the series `NAME_bucket`, `NAME_sum` and `NAME_count`.
"""


def registry() -> CollectorRegistry:
    """Return a registry with all metrics of a service."""
    metrics = ServiceMetrics()
    metrics.watch(float, float, float, DownloadFigures(), DownloadFigures())
    MaterializationMetrics(metrics.registry, dict)
    return metrics.registry


def rows(declared: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield name, kind, labels and meaning of each metric."""
    for collector in declared._collector_to_names:  # noqa: SLF001 - no public attribute has the labels
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labelled: Any = collector if isinstance(collector, MetricWrapperBase) else family
            yield name, family.type, labelled._labelnames, family.documentation  # noqa: SLF001 - as above


def page() -> str:
    """Return the whole page."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, meaning in sorted(rows(registry())):
        lines.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    return "\n".join([_INTRODUCTION, *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
