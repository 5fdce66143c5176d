"""The exact figures of a load test, for `reports/load.json`. No I/O; locust's own tables round their percentiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from loadtest.load.driver import Completed
from loadtest.load.result.store_figures import store_figures
from loadtest.load.result.usage import GENERATOR_CORES_MAX, Usage, busiest_window, cores, memory_mb
from loadtest.load.settings import LoadSettings
from loadtest.load.shapes import Phase
from tools.reporting.figures import Figure, Goal, percentile
from tools.servers.faults.store_model import Drawn

REQUESTS = ("append", "persist", "restore")
RATE_SHARE_MIN = 0.95
"""Share of the checkpoints that rate and shape require; the first second is spent on starting."""

GENERATOR = "CPU of the load generator, busiest 10 s"
"""The figure that decides whether a run counts."""


class Samples:
    """The measurements, request by request."""

    def __init__(self) -> None:
        self.elapsed_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.checkpoints: list[Completed] = []
        self.ended_s: list[float] = []
        """When each checkpoint was complete, in seconds from the run's beginning."""
        self.usage: list[Usage] = []
        self.failures = 0

    def add(self, name: str, elapsed_ms: float, error: Exception | None) -> None:
        """Add one request; the time of a failed one is ignored."""
        if error is None:
            self.elapsed_ms[name].append(elapsed_ms)
        else:
            self.failures += 1

    def add_checkpoint(self, ended_s: float, done: Completed) -> None:
        """Add a completed checkpoint."""
        self.checkpoints.append(done)
        self.ended_s.append(ended_s)


def figures_of(samples: Samples, settings: LoadSettings, elapsed_s: float, drawn: Drawn | None = None) -> list[Figure]:
    """
    Return the figures of a run. Their names follow from the settings alone.

    Args:
        samples: The measurements.
        settings: The load test's.
        elapsed_s: From the first batch to the end.
        drawn: The draws of the proxy in front of the store, if there is one.
    """
    made = samples.checkpoints
    expected = RATE_SHARE_MIN * settings.rate * settings.phases.due_s
    figures = [
        Figure("slots", settings.slots, "slots"),
        Figure("failures", samples.failures, "requests", Goal("==", 0)),
        Figure("checkpoints", len(made), "checkpoints", Goal(">=", expected)),
        Figure("checkpoints per second", len(made) / elapsed_s if elapsed_s > 0 else None, "1/s"),
    ]
    figures += _latencies("checkpoint latency", [checkpoint.latency_ms for checkpoint in made], (50, 90, 99, 99.9))
    for name, values in (
        ("KiB", [checkpoint.bytes_written / 1024 for checkpoint in made]),
        ("objects", [checkpoint.objects_written for checkpoint in made]),
    ):
        figures.append(Figure(f"{name} per checkpoint, mean", sum(values) / len(made) if made else None, name))
        figures.append(Figure(f"{name} per checkpoint, p99", percentile(values, 99), name))
    for name in REQUESTS:
        figures.append(Figure(f"{name}: requests", len(samples.elapsed_ms[name]), "requests"))
        figures += _latencies(name, samples.elapsed_ms[name], (50, 99))
    figures.append(Figure("batch p50, tasks included", percentile(samples.elapsed_ms["batch"], 50), "ms"))
    figures += _phase_figures(samples, settings.phases.phases)
    figures += _usage_figures(samples.usage)
    if settings.needs_proxy:
        figures += store_figures(settings.profile, drawn or Drawn())
    return figures


def _latencies(name: str, values_ms: Sequence[float], percents: Sequence[float]) -> list[Figure]:
    return [Figure(f"{name} p{percent:g}", percentile(values_ms, percent), "ms") for percent in percents]


def _phase_figures(samples: Samples, phases: Sequence[Phase]) -> list[Figure]:
    """Return the figures of each phase, if there are several; a checkpoint counts where it ended."""
    if len(phases) == 1:
        return []
    figures = []
    ends = [0.0, *(phase.end_s for phase in phases)]
    for (begin_s, end_s), phase in zip(pairwise(ends), phases, strict=True):
        until_s = float("inf") if phase is phases[-1] else end_s
        ended = [n for n, ended_s in enumerate(samples.ended_s) if begin_s <= ended_s < until_s]
        latencies_ms = [samples.checkpoints[n].latency_ms for n in ended]
        figures.append(Figure(f"{phase.name}: checkpoints", len(ended), "checkpoints"))
        figures += _latencies(f"{phase.name}: checkpoint latency", latencies_ms, (50, 99))
        if phase.is_out:
            later = [ended_s - end_s for ended_s in samples.ended_s if ended_s >= end_s]
            figures.append(Figure("first checkpoint after the outage", min(later, default=None), "s"))
    return figures


def _usage_figures(usage: Sequence[Usage]) -> list[Figure]:
    used = cores(usage)
    most_mb, growth_mb = memory_mb(usage)
    return [
        Figure("CPU of the load generator", used.generator, "cores"),
        Figure(GENERATOR, busiest_window(usage), "cores", Goal("<=", GENERATOR_CORES_MAX)),
        Figure("CPU of the service", used.service, "cores"),
        Figure("CPU of all programs on the machine", used.machine, "cores"),
        Figure("memory (RSS) of the service, most", most_mb, "MB"),
        Figure("memory (RSS) of the service, growth", growth_mb, "MB"),
    ]
