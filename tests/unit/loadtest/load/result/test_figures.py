"""The figures of a load test."""

from __future__ import annotations

import pytest

from loadtest.load.driver import Completed
from loadtest.load.result.figures import GENERATOR, Samples, figures_of
from loadtest.load.result.usage import Usage
from loadtest.load.settings import LoadSettings
from loadtest.load.shapes import SHAPES
from tools.reporting.figures import strict_exit_code
from tools.servers.faults.store_model import Drawn
from tools.servers.faults.store_profiles import PROFILES

SETTINGS = LoadSettings(slots=2, hosts=1, rate=10, duration_s=1)


def samples_of(checkpoints: int) -> Samples:
    samples = Samples()
    for n in range(checkpoints):
        samples.add_checkpoint(n / 10, Completed(n, float(n + 1), 2048, 2 + n % 2))
    samples.usage = [Usage(0.0, 1.0, 4.0, 10_000_000), Usage(2.0, 1.5, 7.0, 12_000_000)]
    return samples


def values(samples: Samples) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in figures_of(samples, SETTINGS, 2.0)}


def test_checkpoints_are_counted_exactly() -> None:
    """Latencies are exact nearest-rank percentiles; bytes and objects are means and percentiles per checkpoint."""
    found = values(samples_of(10))

    assert found["checkpoint latency p50"] == 5
    assert found["checkpoint latency p99.9"] == 10
    assert found["KiB per checkpoint, mean"] == 2
    assert found["objects per checkpoint, mean"] == 2.5
    assert found["checkpoints per second"] == 5
    assert found["CPU of the load generator"] == 0.25
    assert found["CPU of the service"] == 1.5
    assert found["memory (RSS) of the service, most"] == 12


def test_failed_request_has_no_time() -> None:
    """A failure is counted, and its time is in no percentile."""
    samples = samples_of(10)
    samples.add("append", 3.0, None)
    samples.add("append", 900.0, ValueError())
    found = values(samples)

    assert (found["failures"], found["append: requests"], found["append p99"]) == (1, 1, 3.0)
    assert strict_exit_code(figures_of(samples, SETTINGS, 2.0)) == 1


def test_missing_checkpoints_miss_goal() -> None:
    """A run below the rate misses the goal; a run at the rate reaches it."""
    assert strict_exit_code(figures_of(samples_of(9), SETTINGS, 1.0)) == 1
    assert strict_exit_code(figures_of(samples_of(10), SETTINGS, 1.0)) == 0


def test_run_without_measurements_has_no_error() -> None:
    """A run that ended at once has figures without values."""
    assert values(Samples())["checkpoint latency p50"] is None


def test_busy_generator_misses_goal() -> None:
    """A generator that took more than 0.8 of a core misses the goal of the figure that decides whether a run counts."""
    samples = samples_of(10)
    samples.usage = [Usage(0.0, 0.0), Usage(2.0, 1.7)]
    missed = [figure.name for figure in figures_of(samples, SETTINGS, 2.0) if figure.holds is False]

    assert missed == [GENERATOR]


def test_each_phase_has_its_figures() -> None:
    """A checkpoint counts in the phase in which it ended; the wait for the first one after an outage is reported."""
    samples = Samples()
    for n, ended_s in enumerate((1.0, 3.9, 7.5, 9.0, 11.0)):
        samples.add_checkpoint(ended_s, Completed(n, 10.0 * n, 0, 2))
    settings = LoadSettings(slots=2, hosts=1, rate=1, duration_s=10, shape="outage")
    found = {figure.name: figure.value for figure in figures_of(samples, settings, 11.0)}

    assert [found[f"{phase}: checkpoints"] for phase in ("before", "outage", "after")] == [2, 0, 3]
    assert found["after: checkpoint latency p99"] == 40.0
    assert found["first checkpoint after the outage"] == 1.5


def test_outage_is_not_missed_checkpoints() -> None:
    """Requests that an outage or low rates of a shape leave out are not expected; the others are."""
    goals = {}
    for shape in SHAPES:
        settings = LoadSettings(slots=2, hosts=1, rate=10, duration_s=10, shape=shape)
        goals[shape] = next(
            figure.goal.bound
            for figure in figures_of(Samples(), settings, 10.0)
            if figure.name == "checkpoints" and figure.goal is not None
        )

    assert goals == pytest.approx({"steady": 95, "soak": 95, "ramp": 52.25, "step": 57, "outage": 76})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("store", PROFILES)
def test_names_follow_from_settings(shape: str, store: str) -> None:
    """A run without measurements has figures of the same names as one with all, each name once."""
    settings = LoadSettings(slots=2, hosts=1, shape=shape, store=store)
    samples = samples_of(10)
    samples.add("append", 3.0, None)
    drawn = Drawn(requests=2, latencies_ms={name: [20.0, 30.0] for name in settings.profile.lines})
    names = [figure.name for figure in figures_of(samples, settings, 2.0, drawn)]

    assert names == [figure.name for figure in figures_of(Samples(), settings, 0.0)]
    assert len(names) == len(set(names))
