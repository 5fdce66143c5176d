"""A self-contained HTML page for people, with tables of figures and plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from tools.reporting.figures import Figure, format_number, write_text

StoredFigure: TypeAlias = tuple[str, float | None, str, str | None, bool | None]
"""Name, value, unit, goal as text, and whether it holds."""

_FIGURE_HEADER = ("Figure", "Value", "Goal", "")
_MARKS = {True: '<span class="good">✓ holds</span>', False: '<span class="bad">✗ missed</span>', None: ""}
_UNFOLDED_MAX = 12


class HtmlReport:
    """
    A self-contained page: no script, no font, no address of another host.

    Texts are escaped; `add_plot` alone takes markup, that of `line_plot` and `histogram`.
    """

    def __init__(self, title: str, summary: str) -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>", f'<p class="summary">{escape(summary)}</p>']

    def add_heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def add_subheading(self, text: str) -> None:
        """Begin a part of a section."""
        self._parts.append(f"<h3>{escape(text)}</h3>")

    def add_note(self, text: str) -> None:
        """Add a paragraph in small type."""
        self._parts.append(f'<p class="summary note">{escape(text)}</p>')

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def add_figures(self, figures: Sequence[Figure]) -> None:
        """Add figures as a table with their goals."""
        self._add_rows(_FIGURE_HEADER, [_figure_cells(*_stored(figure)) for figure in figures])

    def add_stored_figures(self, figures: Sequence[StoredFigure]) -> None:
        """Add figures that were read from a report: those with a goal, and folded below them the others of many."""
        rows = [(goal is not None, _figure_cells(*one)) for one in figures for goal in one[3:4]]
        first = [cells for has_goal, cells in rows if has_goal]
        if len(rows) <= _UNFOLDED_MAX or not first:
            self._add_rows(_FIGURE_HEADER, [cells for _, cells in rows])
            return
        self._add_rows(_FIGURE_HEADER, first)
        self._parts.append(f"<details><summary>{len(rows) - len(first)} figures without a goal</summary>")
        self._add_rows(_FIGURE_HEADER, [cells for has_goal, cells in rows if not has_goal])
        self._parts.append("</details>")

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; numbers are formatted and aligned right."""
        self._add_rows(header, [[_cell(value) for value in row] for row in rows], _number_columns(rows))

    def add_plot(self, svg: str) -> None:
        """Add a plot."""
        self._parts.append(f"<figure>{svg}</figure>")

    def write(self, path: Path) -> None:
        """Write the page atomically."""
        body = "\n".join(self._parts)
        write_text(path, _PAGE.format(title=escape(self._title), style=_STYLE, body=body))

    def _add_rows(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()
    ) -> None:
        def line(tag: str, cells: Sequence[str]) -> str:
            number = ' class="number"'
            return "".join(f"<{tag}{number * (n in right)}>{cell}</{tag}>" for n, cell in enumerate(cells))

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        head = line("th", [escape(name) for name in header])
        self._parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')


def _stored(figure: Figure) -> StoredFigure:
    return figure.name, figure.value, figure.unit, None if figure.goal is None else str(figure.goal), figure.holds


def _figure_cells(name: str, value: float | None, unit: str, goal: str | None, holds: bool | None) -> list[str]:  # noqa: FBT001
    number = f"<b>{format_number(value)}</b> {escape(unit)}"
    return [escape(name), number, escape(goal or ""), _MARKS[holds]]


def _cell(value: object) -> str:
    if value is None:
        return format_number(None)
    return format_number(value) if isinstance(value, int | float) else escape(str(value))


def _number_columns(rows: Sequence[Sequence[object]]) -> frozenset[int]:
    columns = list(zip(*rows, strict=True))
    return frozenset(n for n, column in enumerate(columns) if any(isinstance(value, int | float) for value in column))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1d2330; --muted: #5f6b7d; --grid: #e3e7ed;
  --good: #17794b; --bad: #b3261e; --c1: #2563c9; --c2: #c4571b; --c3: #1c8a6a; --c4: #8046c2; }
@media (prefers-color-scheme: dark) { :root { --page: #12151b; --card: #1b2029; --text: #e6e9ef; --muted: #9aa5b6;
  --grid: #2e3541; --good: #5cc98f; --bad: #ff8f85; --c1: #74a5f7; --c2: #f0985f; --c3: #58c9a5; --c4: #bd93f0; } }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 32px 16px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
.note { font-size: 12.5px; margin: 6px 0 14px; overflow-wrap: anywhere; }
details { margin: 8px 0; } summary { color: var(--muted); cursor: pointer; margin: 0 0 6px; }
.summary { color: var(--muted); margin: 0 0 20px; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px; text-align: left; border-top: 1px solid var(--grid); white-space: nowrap; }
tr:first-child > * { border-top: 0; }
th { color: var(--muted); font-weight: 600; font-size: 13px; }
.number { text-align: right; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
figure { margin: 14px 0; padding: 14px; background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--muted); font: 12px system-ui, sans-serif; }
svg .title { fill: var(--text); font-size: 14px; font-weight: 600; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--muted); }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .marker { stroke: var(--bad); stroke-dasharray: 4 3; } svg .marked { fill: var(--bad); }
svg .marked { stroke: var(--card); stroke-width: 5; paint-order: stroke; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); }
svg .bad { fill: var(--bad); }
.dot.c1, .bar.c1 { fill: var(--c1); } .dot.c2, .bar.c2 { fill: var(--c2); }
.dot.c3, .bar.c3 { fill: var(--c3); } .dot.c4, .bar.c4 { fill: var(--c4); }
"""
