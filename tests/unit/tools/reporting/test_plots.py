"""Plots as SVG."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tools.reporting.plots import Marker, Series, histogram, line_plot, ticks


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 23), (0, 0.004), (17, 9_300), (5, 5)])
def test_ticks_cover_range(low: float, high: float) -> None:
    """Ticks are few, evenly spaced and cover both ends."""
    found = ticks(low, high)

    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 9


@pytest.mark.parametrize(
    "svg",
    [
        line_plot("a < b", "s", "ms", [Series("x", [(0, 1.0), (2, 3.0)])], [Marker(1, "kill & go")]),
        line_plot("two", "s", "ms", [Series("x", [(0, 1.0)]), Series("y", [(0, 0.0), (1, 5.0)])]),
        line_plot("flat", "s", "ms", [Series("x", [(3, 0.0)])]),
        line_plot("empty", "s", "ms", [Series("x", [])]),
        histogram("h", "ms", [1.0, 2.0, 2.5, 40.0]),
        histogram("negative", "min", [-3.0, 4.0]),
        histogram("one", "ms", [0.0]),
        histogram("empty", "ms", []),
    ],
)
def test_plots_are_well_formed(svg: str) -> None:
    """Every plot, even of one value or none, is well-formed and has a name for screen readers."""
    assert ET.fromstring(svg).get("aria-label")


def test_histogram_counts_every_value() -> None:
    """The bars' tooltips add up to the number of values."""
    bars = ET.fromstring(histogram("h", "ms", [0.0, 1.0, 2.0, 2.0, 9.9, 10.0])).iter("rect")

    assert sum(int(bar.findtext("title", "").rpartition(": ")[2]) for bar in bars) == 6
