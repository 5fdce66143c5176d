"""Goals, figures, the JSON file and the HTML page of reports."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from loadtest.reporting.figures import Figure, Goal, format_number, percentile, strict_exit_code, write_report_json
from loadtest.reporting.page import HtmlReport
from loadtest.reporting.plots import Marker, Series, histogram, line_plot, ticks


@pytest.mark.parametrize(
    ("relation", "value", "expected"),
    [
        ("<=", 3, True),
        ("<=", 3.1, False),
        (">=", 3, True),
        (">=", 2.9, False),
        ("==", 3, True),
        ("==", 4, False),
        ("<=", None, False),
        (">=", float("nan"), False),
    ],
)
def test_goal_is_relation_to_bound(relation, value, expected):
    """A goal includes its bound; a figure that was not measured never reaches it."""
    assert Goal(relation, 3).holds(value) is expected


def test_strict_exit_code_tells_missed_goal():
    """Only a missed goal gives exit code 1; figures without a goal do not count."""
    good = [Figure("a", 1, "ms", Goal("<=", 2)), Figure("b", None, "ms")]

    assert strict_exit_code(good) == 0
    assert strict_exit_code([*good, Figure("c", 3, "ms", Goal("<=", 2))]) == 1


def test_json_has_one_object_per_figure(tmp_path):
    """Each figure is written with name, value, unit, goal and whether it holds; the folder is created."""
    path = tmp_path / "reports" / "demo.json"
    write_report_json(path, [Figure("a", 1.5, "ms", Goal("<=", 2)), Figure("b", None, "s")])

    assert json.loads(path.read_text(encoding="utf-8")) == [
        {"name": "a", "value": 1.5, "unit": "ms", "goal": "<= 2", "holds": True},
        {"name": "b", "value": None, "unit": "s", "goal": None, "holds": None},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["demo.json"]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([5.0], 99, 5.0), ([3, 1, 2], 50, 2), (range(1, 101), 99, 99), (range(1, 101), 0, 1)],
)
def test_percentile_has_nearest_rank(values, percent, expected):
    """A percentile is one of the values, that with rank ceil(percent / 100 * n)."""
    assert percentile(list(values), percent) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (1234567, "1,234,567"), (1234.56, "1,235"), (123.45, "123.5"), (0.01234, "0.0123")],
)
def test_numbers_are_readable(value, text):
    """Numbers have thousands separators and about three digits behind them."""
    assert format_number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 23), (0, 0.004), (17, 9_300), (5, 5)])
def test_ticks_cover_range(low, high):
    """Ticks are few, evenly spaced and reach over both ends."""
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
def test_plots_are_well_formed(svg):
    """Every plot, also of one value or none, is well-formed and has a name for screen readers."""
    assert ET.fromstring(svg).get("aria-label")


def test_histogram_counts_every_value():
    """The bars' tooltips add up to the number of values."""
    bars = ET.fromstring(histogram("h", "ms", [0.0, 1.0, 2.0, 2.0, 9.9, 10.0])).iter("rect")

    assert sum(int(bar.findtext("title", "").rpartition(": ")[2]) for bar in bars) == 6


def test_page_escapes_texts(tmp_path):
    """Titles, cells and units are texts, never markup."""
    report = HtmlReport("a <b>", "c & d")
    report.add_heading("<i>")
    report.add_text("<u>")
    report.add_figures([Figure("<x>", 1, "<ms>", Goal("<=", 2))])
    report.add_table(["<h>", "n"], [["<cell>", 1234]])
    report.write(tmp_path / "page.html")

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in ("<i>", "<u>", "<x>", "<ms>", "<h>", "<cell>"):
        assert text not in page
    assert "&lt;cell&gt;" in page
    assert "1,234" in page


def test_page_is_self_contained(tmp_path):
    """The page has no script and no address, and knows light and dark."""
    report = HtmlReport("title", "summary")
    report.add_plot(histogram("h", "ms", [1.0]))
    report.write(tmp_path / "page.html")

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in ("<script", "http", "url(", "@import"):
        assert text not in page
    assert "prefers-color-scheme: dark" in page
