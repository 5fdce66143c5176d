"""Processor time and memory over a run, from samples. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW_S = 10.0
"""The generator's use of a core is judged over its busiest window of this length, or over a shorter run as a whole."""

GENERATOR_CORES_MAX = 0.8
"""Above this, the generator, which has one thread, measures itself: such a run does not count."""

_MB = 1e6


@dataclass(frozen=True, slots=True)
class Usage:
    """
    A sample.

    Args:
        at_s: Seconds from the run's beginning.
        generator_cpu_s: Processor time of the load generator so far.
        service_cpu_s: CPU seconds of the service under load, if known.
        service_bytes: Resident memory of the service, if it is known.
        machine_cpu_s: Processor time of all programs of the machine so far, this test's included.
    """

    at_s: float
    generator_cpu_s: float
    service_cpu_s: float | None = None
    service_bytes: int | None = None
    machine_cpu_s: float = 0.0


def busiest_window(samples: Sequence[Usage]) -> float | None:
    """Return the generator's cores in its busiest window of `WINDOW_S`; None without two samples."""
    if len(samples) < 2 or samples[-1].at_s <= samples[0].at_s:
        return None
    most = 0.0
    begin = 0
    for number, sample in enumerate(samples):
        while begin + 1 < number and sample.at_s - samples[begin + 1].at_s >= WINDOW_S:
            begin += 1
        elapsed_s = sample.at_s - samples[begin].at_s
        if elapsed_s >= WINDOW_S:
            most = max(most, (sample.generator_cpu_s - samples[begin].generator_cpu_s) / elapsed_s)
    return most or cores(samples).generator


@dataclass(frozen=True, slots=True)
class Cores:
    """Mean use of processors, in cores; None if it is not known."""

    generator: float | None = None
    service: float | None = None
    machine: float | None = None


def cores(samples: Sequence[Usage]) -> Cores:
    """Return the mean use from the first sample to the last."""
    if len(samples) < 2 or samples[-1].at_s <= samples[0].at_s:
        return Cores()
    first, last = samples[0], samples[-1]
    elapsed_s = last.at_s - first.at_s
    service = None
    if first.service_cpu_s is not None and last.service_cpu_s is not None:
        service = (last.service_cpu_s - first.service_cpu_s) / elapsed_s
    return Cores(
        generator=(last.generator_cpu_s - first.generator_cpu_s) / elapsed_s,
        service=service,
        machine=(last.machine_cpu_s - first.machine_cpu_s) / elapsed_s,
    )


def memory_mb(samples: Sequence[Usage]) -> tuple[float | None, float | None]:
    """
    Return the service's most memory, and its growth from the second quarter of the run to the last, in MB.

    The growth is that of the medians; None with fewer than eight samples.
    """
    sizes = [sample.service_bytes / _MB for sample in samples if sample.service_bytes is not None]
    quarter = len(sizes) // 4
    growth = median(sizes[-quarter:]) - median(sizes[quarter : 2 * quarter]) if quarter >= 2 else None
    return max(sizes, default=None), growth
