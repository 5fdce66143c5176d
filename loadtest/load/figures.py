"""The exact figures of a load test, for `reports/load.json`. No I/O; locust's own tables round their percentiles."""

from __future__ import annotations

from collections import defaultdict

from loadtest.load.driver import Completed
from loadtest.load.settings import LoadSettings
from tools.reporting.figures import Figure, Goal, percentile

REQUESTS = ("append", "persist", "restore")
RATE_SHARE_MIN = 0.95
"""Share of the checkpoints that the rate requires; the first second is spent on starting."""


class Samples:
    """The measurements, request by request."""

    def __init__(self) -> None:
        self.elapsed_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.checkpoints: list[Completed] = []
        self.failures = 0

    def add(self, name: str, elapsed_ms: float, error: Exception | None) -> None:
        """Add one request; the time of a failed one is ignored."""
        if error is None:
            self.elapsed_ms[name].append(elapsed_ms)
        else:
            self.failures += 1


def figures_of(
    samples: Samples, settings: LoadSettings, elapsed_s: float, cpu_s: float, service_cpu_s: float | None = None
) -> list[Figure]:
    """
    Return the figures of a run.

    Args:
        samples: The measurements.
        settings: The load test's.
        elapsed_s: From the first batch to the end.
        cpu_s: CPU time of this process meanwhile; if it is near `elapsed_s`, the generator limited the load.
        service_cpu_s: CPU time of the service, if known.
    """
    made = samples.checkpoints
    latencies_ms = [checkpoint.latency_ms for checkpoint in made]
    expected = RATE_SHARE_MIN * settings.rate * settings.duration_s
    figures = [
        Figure("slots", settings.slots, "slots"),
        Figure("failures", samples.failures, "requests", Goal("==", 0)),
        Figure("checkpoints", len(made), "checkpoints", Goal(">=", expected)),
        Figure("checkpoints per second", len(made) / elapsed_s if elapsed_s > 0 else None, "1/s"),
    ]
    figures += [
        Figure(f"checkpoint latency p{percent:g}", percentile(latencies_ms, percent), "ms")
        for percent in (50, 90, 99, 99.9)
    ]
    for name, values in (
        ("KiB", [checkpoint.bytes_written / 1024 for checkpoint in made]),
        ("objects", [checkpoint.objects_written for checkpoint in made]),
    ):
        figures.append(Figure(f"{name} per checkpoint, mean", sum(values) / len(made) if made else None, name))
        figures.append(Figure(f"{name} per checkpoint, p99", percentile(values, 99), name))
    for name in REQUESTS:
        values = samples.elapsed_ms[name]
        figures.append(Figure(f"{name}: requests", len(values), "requests"))
        figures += [Figure(f"{name} p{percent}", percentile(values, percent), "ms") for percent in (50, 99)]
    figures.append(Figure("batch p50, tasks included", percentile(samples.elapsed_ms["batch"], 50), "ms"))
    for name, value in (("load generator", cpu_s), ("service", service_cpu_s)):
        cores = None if value is None or elapsed_s <= 0 else value / elapsed_s
        figures.append(Figure(f"CPU of the {name}", cores, "cores"))
    return figures
