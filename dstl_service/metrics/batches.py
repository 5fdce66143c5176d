"""Metrics of queries, which drivers report to their coordinator after each batch."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dstl_service.wire import BatchFigures

_SECONDS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_COUNTS = {
    "rows": "Input rows of stateful operators.",
    "keys": "Visited keys, counted once per batch.",
    "changes": "State changes.",
    "state_reads": "Reads of tables.",
    "log_bytes": "Bytes of change sets that checkpoints name.",
    "rows_lost": "Rows that were set aside in mode bounded-loss.",
}
_COPIES = {
    "tables": "Copies of tables that are complete, as of a job's last batch.",
    "missing": "Copies of tables that are not complete, or have no room.",
    "lag": "Checkpoints that the oldest complete copy lacks.",
    "bytes": "Size of all complete copies.",
}
_PHASES = ("state", "function", "checkpoint", "upload", "manifest")


class BatchMetrics:
    """Counts and durations of batches, by job."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._batches = Counter("dstl_batches", "Batches whose checkpoint was completed.", ["job"], registry=registry)
        self._repeated = Counter(
            "dstl_batches_repeated", "Executions of batches beyond the first.", ["job"], registry=registry
        )
        self._counts = {
            name: Counter(f"dstl_batch_{name}", text, ["job"], registry=registry) for name, text in _COUNTS.items()
        }
        self._seconds = Histogram(
            "dstl_batch_seconds",
            "Time of a batch by phase; upload and manifest are parts of checkpoint.",
            ["job", "phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._table_bytes = Gauge(
            "dstl_batch_table_bytes", "Size of the tables that a job's last batch opened.", ["job"], registry=registry
        )
        self._rows_waiting = Gauge(
            "dstl_batch_rows_waiting",
            "Deferred rows that had not run after a job's last batch, since tables were being restored.",
            ["job"],
            registry=registry,
        )
        self._unpublished = Gauge(
            "dstl_unpublished_checkpoints",
            "Checkpoints before a job's last batch whose output its sink had not published.",
            ["job"],
            registry=registry,
        )
        self._copies = {
            name: Gauge(f"dstl_standby_{name}", text, ["job"], registry=registry) for name, text in _COPIES.items()
        }

    def observe(self, job: str, figures: BatchFigures) -> None:
        """Count a finished batch."""
        self._batches.labels(job).inc()
        self._repeated.labels(job).inc(figures.tries - 1)
        for name, counter in self._counts.items():
            counter.labels(job).inc(getattr(figures, name))
        for phase in _PHASES:
            self._seconds.labels(job, phase).observe(getattr(figures, f"{phase}_ms") / 1000)
        self._table_bytes.labels(job).set(figures.table_bytes)
        self._rows_waiting.labels(job).set(figures.rows_waiting)
        self._unpublished.labels(job).set(figures.unpublished)
        for name, gauge in self._copies.items():
            gauge.labels(job).set(getattr(figures, f"standby_{name}"))
