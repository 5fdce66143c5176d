"""`make report`: what exists is shown with what it was made with, what is missing names its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.report.__main__ import main
from tools.report.page import write_report
from tools.report.reading import read_target
from tools.report.sections import sections
from tools.reporting.figures import Figure, Goal
from tools.reporting.history import History
from tools.reporting.plots import Marker, Series
from tools.reporting.target import TARGETS, TargetReport

_FIGURES = [Figure("persist p99", 12.5, "ms", Goal("<=", 20)), Figure("lost", 1, "sets", Goal("==", 0))]
_HISTORY = History("latency <b>", "checkpoint", "ms", (Series("checkpoint", [(1, 5), (2, 9)]),), (Marker(2, "stored"),))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN", "STRICT", "SHORT", "ONLY"):
        monkeypatch.delenv(name, raising=False)


def test_page_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's figures, goals, plot, command and machine are on the page; the JSON has each with its command."""
    monkeypatch.setenv("SHORT", "1")
    TargetReport("bench-tails", tmp_path).write(_FIGURES, [_HISTORY])

    assert main(["--reports", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (
        "persist p99",
        "✗ missed",
        "1 of 2",
        "latency &lt;b&gt;",
        "make bench-tails SHORT=1",
        "Python 3",
        "GiB",
    ):
        assert text in page
    for text in ("<script", "http:", "https:", "url(", "@import", "latency <b>"):
        assert text not in page
    rows = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(row["name"], row["value"], row["holds"]) for row in rows] == [
        ("persist p99", 12.5, True),
        ("lost", 1, False),
    ]
    assert {row["command"] for row in rows} == {"make bench-tails SHORT=1"}


def test_missing_reports_name_their_command(tmp_path: Path) -> None:
    """Without any report, every target is on the page with the command that fills it."""
    assert main(["--reports", str(tmp_path)]) == 0

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(f"make {target} fills this" in page for target in TARGETS)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"name": "x", "value": "fast"}]', '[{"value": 1}]'])
def test_damaged_report_is_named(tmp_path: Path, text: str) -> None:
    """A report that is cut off or of another kind does not end the others; the page says that it cannot be read."""
    (tmp_path / "bench-tails.json").write_text(text, encoding="utf-8")
    TargetReport("bench", tmp_path).write(_FIGURES)

    assert main(["--reports", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "its report cannot be read" in page
    assert "persist p99" in page


def test_each_target_has_one_place() -> None:
    """Every target is in exactly one section, also one that no section knows by name."""
    targets = [target for section in sections((*TARGETS, "bench-new")) for target in section.targets]

    assert sorted(targets) == sorted((*TARGETS, "bench-new"))


def test_history_comes_back(tmp_path: Path) -> None:
    """A history is read as it was written; of many points fewer stay, and the highest among them."""
    points = [(float(x), 1000.0 if x == 1234 else 1.0) for x in range(5_000)]
    long = History("long", "x", "ms", (Series("line", points),))
    TargetReport("bench-tails", tmp_path).write(_FIGURES, [_HISTORY, long])

    first, second = read_target(tmp_path, "bench-tails").histories
    assert (first.title, first.series[0].points, first.markers) == (
        "latency <b>",
        [(1, 5), (2, 9)],
        (Marker(2, "stored"),),
    )
    assert len(second.series[0].points) <= 1_000
    assert (1234.0, 1000.0) in second.series[0].points


def test_next_run_takes_histories_away(tmp_path: Path) -> None:
    """A run that fails leaves no history of an earlier one."""
    TargetReport("bench-tails", tmp_path).write(_FIGURES, [_HISTORY])
    TargetReport("bench-tails", tmp_path)

    found = read_target(tmp_path, "bench-tails")
    assert (found.rows, found.histories) == (None, ())
    assert found.about is not None


def test_load_history_is_read(tmp_path: Path) -> None:
    """The latencies that locust writes every second become a line for each percentile, from the start of the run."""
    TargetReport("load", tmp_path).write(_FIGURES)
    (tmp_path / "load").mkdir()
    table = "Timestamp,Name,50%,95%,99%\n100,Aggregated,N/A,N/A,N/A\n101,Aggregated,5,8,9\n102,Aggregated,6,8,10\n"
    (tmp_path / "load" / "locust_stats_history.csv").write_text(table, encoding="utf-8")

    (history,) = read_target(tmp_path, "load").histories
    assert [(line.name, line.points) for line in history.series] == [
        ("p50", [(1, 5), (2, 6)]),
        ("p95", [(1, 8), (2, 8)]),
        ("p99", [(1, 9), (2, 10)]),
    ]


def test_unknown_target_to_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RUN with a name that is no target says which there are, and runs nothing."""
    with pytest.raises(SystemExit):
        main(["--run", "bench-tail", "--reports", str(tmp_path)])
    assert "choose missing, or from attack" in capsys.readouterr().err


def test_progress_is_on_the_page(tmp_path: Path) -> None:
    """While commands run, the page says which one does."""
    write_report(tmp_path, sections(), {target: read_target(tmp_path, target) for target in TARGETS}, "Running 1 of 2.")

    assert "Running 1 of 2." in (tmp_path / "report.html").read_text(encoding="utf-8")
