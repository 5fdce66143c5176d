"""Samples of a long run, and whether their measures are flat. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.reporting.figures import Figure, Goal
from tools.reporting.history import History
from tools.reporting.plots import Series

GROWTH_MAX = 1.05
"""Most that the median of the last third of a run may be of that of the second."""
THIRDS = 3
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """
    The measurements after a batch.

    Args:
        batch: The batch's number.
        latency_ms: Median time of the batches since the sample before.
        memory_bytes: Resident memory by kind of process.
        heap_bytes: What the JVM's heap holds after a collection.
        objects: Number of objects in the bucket.
        object_bytes: Their size.
        disk_bytes: Size of all files on the local disk: tables, Spark's own files and checkpoints, and logs.
    """

    batch: int
    latency_ms: float
    memory_bytes: Mapping[str, int]
    heap_bytes: int
    objects: int
    object_bytes: int
    disk_bytes: int


def measured(samples: Sequence[Sample]) -> dict[str, tuple[str, list[float]]]:
    """Return the measures of all samples, by name: the unit, and a value per sample."""
    kinds = sorted({kind for sample in samples for kind in sample.memory_bytes})
    memory = {
        f"memory (RSS) of {kind}": ("MB", [sample.memory_bytes.get(kind, 0) / _MB for sample in samples])
        for kind in kinds
    }
    return {
        "batch": ("ms", [sample.latency_ms for sample in samples]),
        **memory,
        "heap of the JVM": ("MB", [sample.heap_bytes / _MB for sample in samples]),
        "objects in the bucket": ("objects", [float(sample.objects) for sample in samples]),
        "bytes in the bucket": ("MB", [sample.object_bytes / _MB for sample in samples]),
        "local disk": ("MB", [sample.disk_bytes / _MB for sample in samples]),
    }


def figures(samples: Sequence[Sample], batches: int) -> list[Figure]:
    """
    Return the medians of the last third, each with its growth since the second third.

    The first third does not count: caches fill, the JVM compiles, and the first checkpoints are not yet deleted.

    Args:
        samples: In the order of their batches; growth needs three or more.
        batches: How many batches were wanted.
    """
    third = len(samples) // THIRDS
    found = [Figure("batches", samples[-1].batch + 1 if samples else 0, "batches", Goal(">=", batches))]
    for name, (unit, values) in measured(samples).items():
        if third:
            middle, last = (statistics.median(part) for part in (values[third : 2 * third], values[-third:]))
            found += [
                Figure(f"{name}, median of the last third", last, unit),
                Figure(f"{name}, last third / second third", _ratio(last, middle), "ratio", Goal("<=", GROWTH_MAX)),
            ]
    return found


def histories(samples: Sequence[Sample]) -> list[History]:
    """Return a plot of each measure over the batches; memory of all processes in one."""
    batches = [float(sample.batch) for sample in samples]
    series = {
        name: (unit, Series(name, list(zip(batches, values, strict=True))))
        for name, (unit, values) in measured(samples).items()
    }
    memory = tuple(line for name, (_, line) in series.items() if name.startswith("memory"))
    others = [(name, unit, (line,)) for name, (unit, line) in series.items() if not name.startswith("memory")]
    return [
        History(title[:1].upper() + title[1:], "batch", unit, lines)
        for title, unit, lines in [("memory (RSS)", "MB", memory), *others]
    ]


def _ratio(last: float, middle: float) -> float:
    return last / middle if middle else 1.0 if not last else float("inf")
