"""Processor time and memory of a run."""

from __future__ import annotations

import pytest

from loadtest.load.result.usage import Cores, Usage, busiest_window, cores, memory_mb


def samples_of(shares: list[float], step_s: float = 1.0) -> list[Usage]:
    """Return samples, one per step, of a generator that takes these shares of a core in each step."""
    spent_s = 0.0
    made = [Usage(0.0, 0.0, 0.0, 0)]
    for number, share in enumerate(shares, start=1):
        spent_s += share * step_s
        made.append(Usage(number * step_s, spent_s, spent_s / 2, number * 1_000_000))
    return made


def test_busy_end_of_idle_run_is_found() -> None:
    """A generator that is busy for ten seconds of a minute is judged by those; its mean tells nothing."""
    samples = samples_of([0.1] * 40 + [0.95] * 10 + [0.1] * 10)

    assert busiest_window(samples) == pytest.approx(0.95)
    assert cores(samples).generator == pytest.approx(14.5 / 60)


def test_short_peak_is_none() -> None:
    """Two busy seconds are not ten."""
    assert busiest_window(samples_of([0.2] * 20 + [1.0] * 2 + [0.2] * 20)) == pytest.approx(0.36)


@pytest.mark.parametrize("step_s", [0.3, 1.0, 7.0, 30.0])
def test_samples_may_be_at_any_distance(step_s: float) -> None:
    """Windows are found whatever the distance of the samples."""
    assert busiest_window(samples_of([0.5] * 50, step_s)) == pytest.approx(0.5)


def test_short_run_is_judged_as_a_whole() -> None:
    """A run shorter than the window has its mean."""
    assert busiest_window(samples_of([0.4, 0.8])) == pytest.approx(0.6)


def test_nothing_is_known_without_samples() -> None:
    """Without two samples nothing was measured; without the service's process, nothing of it."""
    for samples in ([], [Usage(0.0, 1.0)], [Usage(1.0, 1.0), Usage(1.0, 2.0)]):
        assert busiest_window(samples) is None
        assert cores(samples) == Cores()
    assert cores([Usage(0.0, 1.0, machine_cpu_s=7.0), Usage(2.0, 2.0, machine_cpu_s=10.0)]) == Cores(0.5, None, 1.5)
    assert memory_mb([Usage(0.0, 1.0), Usage(2.0, 2.0)]) == (None, None)


def test_memory_grows_from_second_quarter_to_last() -> None:
    """The growth is between the medians of two quarters: neither the start nor one peak counts."""
    sizes = [1, 50, 100, 100, 100, 900, 100, 110, 120, 130, 130, 130]
    samples = [Usage(float(n), 0.0, 0.0, size * 1_000_000) for n, size in enumerate(sizes)]

    assert memory_mb(samples) == (900, 30)
    assert memory_mb(samples[:7]) == (900, None)
