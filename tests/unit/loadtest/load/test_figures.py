"""The figures of a load test."""

from __future__ import annotations

from loadtest.load.driver import Completed
from loadtest.load.figures import Samples, figures_of
from loadtest.load.settings import LoadSettings
from tools.reporting.figures import strict_exit_code

SETTINGS = LoadSettings(slots=2, hosts=1, rate=10, duration_s=1)


def samples_of(checkpoints: int) -> Samples:
    samples = Samples()
    samples.checkpoints = [Completed(n, float(n + 1), 2048, 2 + n % 2) for n in range(checkpoints)]
    return samples


def values(samples: Samples) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures_of(samples, SETTINGS, 2.0, 0.5)}


def test_checkpoints_are_counted_exactly() -> None:
    """Latencies are exact nearest-rank percentiles; bytes and objects are means and percentiles per checkpoint."""
    found = values(samples_of(10))

    assert found["checkpoint latency p50"] == 5
    assert found["checkpoint latency p99.9"] == 10
    assert found["KiB per checkpoint, mean"] == 2
    assert found["objects per checkpoint, mean"] == 2.5
    assert found["checkpoints per second"] == 5
    assert found["CPU of the load generator"] == 0.25


def test_failed_request_has_no_time() -> None:
    """A failure is counted, and its time is in no percentile."""
    samples = samples_of(10)
    samples.add("append", 3.0, None)
    samples.add("append", 900.0, ValueError())
    found = values(samples)

    assert (found["failures"], found["append: requests"], found["append p99"]) == (1, 1, 3.0)
    assert strict_exit_code(figures_of(samples, SETTINGS, 2.0, 0.5)) == 1


def test_missing_checkpoints_miss_goal() -> None:
    """A run below the rate misses the goal; a run at the rate reaches it."""
    assert strict_exit_code(figures_of(samples_of(9), SETTINGS, 1.0, 0.5)) == 1
    assert strict_exit_code(figures_of(samples_of(10), SETTINGS, 1.0, 0.5)) == 0


def test_run_without_measurements_has_no_error() -> None:
    """A run that ended at once has figures without values."""
    assert values(Samples())["checkpoint latency p50"] is None
