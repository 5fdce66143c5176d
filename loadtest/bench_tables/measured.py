"""The measurements of one workload, and its figures with their goals. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from loadtest.bench_tables.cells import Cell, Way, measured_ratio
from loadtest.bench_tables.published import PARALLELISM, PERCENTS, TABLES
from loadtest.bench_tables.recording import Recording
from loadtest.bench_tables.simulation import ONE_HOST
from loadtest.bench_tables.workloads import SCALE
from tools.reporting.figures import Figure, Goal, percentile
from tools.reporting.history import History
from tools.reporting.plots import Marker, Series

_FASTER = {"value-state": (10, 5), "sliding-window": (5, 2)}
"""Goals of p99.9 against off as Flink's users have it, and against off with our uploader."""
_FULL = {"value-state": 1.3, "sliding-window": 2}
_RECOVERY = 1.5
_MARKERS_MAX = 12


@dataclass(frozen=True, slots=True)
class Durations:
    """How long the checkpoints of a cell took."""

    cell: Cell
    took_ms: list[float]

    @property
    def name(self) -> str:
        """Its way and its layout."""
        return f"{self.cell.way}, {self.cell.layout.name}"

    def at(self, percent: float) -> float:
        """Return a percentile in ms."""
        return percentile(self.took_ms, percent) or 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """
    All of one workload.

    Args:
        name: The workload's.
        recording: What its checkpoints upload.
        recovery_s: Time to restore with the changelog on, and off.
        real: In real time.
        simulated: On the virtual clock.
    """

    name: str
    recording: Recording
    recovery_s: tuple[float, float]
    real: list[Durations]
    simulated: list[Durations]

    def of(self, way: Way, layout: str) -> Durations:
        """Return the simulated durations of a cell."""
        return next(one for one in self.simulated if (one.cell.way, one.cell.layout.name) == (way, layout))

    def full_mb(self) -> tuple[list[float], list[float]]:
        """Return the sizes of whole checkpoints of all subtasks, on and off, at the published scale."""
        factor = SCALE * PARALLELISM / 1e6
        return [size * factor for size in self.recording.full_on], [size * factor for size in self.recording.full_off]


def figures_of(found: Measured) -> list[Figure]:
    """Return the figures of a workload."""
    return [*_durations(found), *_ratios(found), *_sizes(found), *_recovery(found), *_real(found)]


def histories_of(found: Measured) -> list[History]:
    """Return the recording over time: latency, objects and bytes."""
    recording, name = found.recording, found.name
    markers = tuple(Marker(float(number), "materialized") for number in recording.materialized[:_MARKERS_MAX])
    latency = Series("checkpoint", list(enumerate(recording.on_ms, start=1)))
    objects = Series("objects", [(number, objects) for number, objects, _ in recording.stored])
    stored = Series("in the storage, all retained checkpoints", [(at, size / 1e6) for at, _, size in recording.stored])
    numbers = [at for at, _, _ in recording.stored]
    full = Series("the newest checkpoint", [(at, s / 1e6) for at, s in zip(numbers, recording.full_on, strict=False)])
    return [
        History(f"{name}: latency of a checkpoint", "checkpoint", "ms", (latency,), markers),
        History(f"{name}: objects in the storage", "checkpoint", "objects", (objects,), markers),
        History(f"{name}: space", "checkpoint", "MB", (stored, full), markers),
    ]


def _durations(found: Measured) -> list[Figure]:
    return [
        Figure(f"{found.name}: checkpoint p{percent:g}, {one.name}", one.at(percent), "ms")
        for one in found.simulated
        if one.cell.layout.parallelism == PARALLELISM
        for percent in PERCENTS
    ]


def _ratios(found: Measured) -> list[Figure]:
    figures = []
    for layout in dict.fromkeys(one.cell.layout.name for one in found.simulated):
        on = found.of("on", layout).at(99.9)
        for way, goal in zip(("off", "off, hedged"), _FASTER[found.name], strict=True):
            others = [one for one in found.simulated if (one.cell.way, one.cell.layout.name) == (way, layout)]
            wanted = Goal(">=", goal) if layout == ONE_HOST.name else None
            for other in others:
                name = f"{found.name}: p99.9 against {other.name}"
                figures.append(Figure(name, other.at(99.9) / on, "x", wanted))
    published = TABLES[found.name].duration_ms
    return [*figures, Figure(f"{found.name}: p99.9 against off, Flink's published", published.ratio(3), "x")]


def _sizes(found: Measured) -> list[Figure]:
    on, off = (found.of(way, ONE_HOST.name).cell.sizes_mb() for way in ("on", "off"))
    full_on, full_off = found.full_mb()
    published = TABLES[found.name]
    name, ratio = found.name, measured_ratio(found.recording)
    return [
        *(Figure(f"{name}: checkpointed p{percent:g}, on", percentile(on, percent), "MB") for percent in PERCENTS),
        *(Figure(f"{name}: checkpointed p{percent:g}, off", percentile(off, percent), "MB") for percent in PERCENTS),
        Figure(f"{name}: checkpointed off/on as recorded", ratio, "x"),
        Figure(f"{name}: checkpointed off/on, Flink's published", published.checkpointed_mb.ratio(0), "x"),
        Figure(f"{name}: full size, on", mean(full_on), "MB"),
        Figure(f"{name}: full size, off", mean(full_off), "MB"),
        Figure(f"{name}: full size, on/off", mean(full_on) / mean(full_off), "x", Goal("<=", _FULL[name])),
        Figure(f"{name}: full size, on/off, Flink's published", 1 / published.full_mb.ratio(0), "x"),
    ]


def _recovery(found: Measured) -> list[Figure]:
    on_s, off_s = found.recovery_s
    return [
        Figure(f"{found.name}: recovery, on", on_s, "s"),
        Figure(f"{found.name}: recovery, off", off_s, "s"),
        Figure(f"{found.name}: recovery, on/off", on_s / off_s, "x", Goal("<=", _RECOVERY)),
    ]


def _real(found: Measured) -> list[Figure]:
    figures = []
    for real in found.real:
        simulated = found.of(real.cell.way, real.cell.layout.name)
        for percent in PERCENTS[:2]:
            name = f"{found.name}: checkpoint p{percent:g}, {real.name}"
            figures.append(Figure(f"{name}, in real time", real.at(percent), "ms"))
            figures.append(Figure(f"{name}, simulated", simulated.at(percent), "ms"))
    return figures
