"""The HTML page of a report."""

from __future__ import annotations

from pathlib import Path

from tools.reporting.figures import Figure, Goal
from tools.reporting.page import HtmlReport
from tools.reporting.plots import histogram


def test_page_escapes_texts(tmp_path: Path) -> None:
    """Titles, cells and units are text, never markup."""
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


def test_page_is_self_contained(tmp_path: Path) -> None:
    """The page has no script and no address, and supports light and dark mode."""
    report = HtmlReport("title", "summary")
    report.add_plot(histogram("h", "ms", [1.0]))
    report.write(tmp_path / "page.html")

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in ("<script", "http", "url(", "@import"):
        assert text not in page
    assert "prefers-color-scheme: dark" in page
