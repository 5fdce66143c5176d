"""Measures that grow in a long run are told from flat ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtest.soak.samples import Sample, figures, histories


def run(objects: Callable[[int], float], count: int = 30) -> list[Sample]:
    """Return the samples of a run with a sample every ten batches, in which only the objects change."""
    memory = {"the driver": 100_000_000, "the sidecar": 90_000_000}
    return [Sample(10 * n + 9, 300.0, memory, 200_000_000, int(objects(n)), 5_000_000, 8_000) for n in range(count)]


def test_flat_run_reaches_all_goals() -> None:
    """A measure that keeps its size, or grows in the first third only, is flat."""
    found = figures(run(lambda n: min(n, 10) * 100), 300)

    assert [figure.name for figure in found if figure.holds is False] == []
    values = {figure.name: figure.value for figure in found}
    assert values["batches"] == 300
    assert values["objects in the bucket, median of the last third"] == 1_000
    assert values["memory (RSS) of the sidecar, median of the last third"] == 90
    assert values["local disk, last third / second third"] == 1


def test_growth_is_found_in_what_grows_only() -> None:
    """A slow leak of objects misses the goal of the objects, and no other."""
    [missed] = [figure for figure in figures(run(lambda n: 1_000 + 10 * n), 300) if figure.holds is False]

    assert missed.name == "objects in the bucket, last third / second third"
    assert missed.value == pytest.approx(1_250 / 1_150, rel=0.01)


def test_something_from_nothing_is_growth() -> None:
    """A measure that was zero before has grown without bound; one that stays zero has not."""
    values = {figure.name: figure.value for figure in figures(run(lambda n: n // 20), 300)}
    assert values["objects in the bucket, last third / second third"] == float("inf")

    values = {figure.name: figure.value for figure in figures(run(lambda n: 0), 300)}
    assert values["objects in the bucket, last third / second third"] == 1


def test_short_runs_miss_their_batches() -> None:
    """A run that ended early does not reach its goal, and has no growth if it has too few samples."""
    [batches] = figures(run(lambda n: 1, count=2), 300)
    assert not batches.holds
    [none] = figures([], 300)
    assert not none.holds


def test_plots_have_all_measures() -> None:
    """Memory of all processes is in one plot; each other measure has its own."""
    plots = histories(run(lambda n: n))

    assert [plot.title for plot in plots] == [
        "Memory (RSS)",
        "Batch",
        "Heap of the JVM",
        "Objects in the bucket",
        "Bytes in the bucket",
        "Local disk",
    ]
    assert [line.name for line in plots[0].series] == ["memory (RSS) of the driver", "memory (RSS) of the sidecar"]
    assert plots[3].series[0].points[-1] == (299, 29)
