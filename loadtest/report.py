"""
Reports of measured figures: goals, a JSON file for machines and a self-contained HTML page with plots for people.

Owns no measurement and imports neither Spark nor a plotting library; the plots are SVG with the page's own colours, so
that they are readable in light and dark. Nothing here reads what it writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

Relation = Literal["<=", ">=", "=="]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure has to be: its relation to a bound."""

    relation: Relation
    bound: float

    def holds(self, value: float | None) -> bool:
        """Tell whether a value reaches the goal; one that was not measured does not."""
        if value is None or math.isnan(value):
            return False
        if self.relation == "<=":
            return value <= self.bound
        if self.relation == ">=":
            return value >= self.bound
        return value == self.bound

    def __str__(self) -> str:
        return f"{self.relation} {format_number(self.bound)}"


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure."""

    name: str
    value: float | None
    """None if it was not measured."""
    unit: str
    goal: Goal | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        return None if self.goal is None else self.goal.holds(self.value)


@dataclass(frozen=True, slots=True)
class Series:
    """Named points of a line, in ascending order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Marker:
    """A named position on the x axis, such as the moment of a kill."""

    x: float
    label: str


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile: of n values in ascending order the one with rank ceil(percent / 100 * n)."""
    if not values:
        return None
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]


def write_report_json(path: Path, figures: Sequence[Figure]) -> None:
    """Write figures as a list of objects with name, value, unit, goal (text or null) and holds (null without goal)."""
    rows = [
        {
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "goal": None if figure.goal is None else str(figure.goal),
            "holds": figure.holds,
        }
        for figure in figures
    ]
    _write_text(path, json.dumps(rows, indent=2) + "\n")


def is_strict() -> bool:
    """Say whether a missed goal makes a run fail: STRICT=1 in the environment."""
    return os.environ.get("STRICT", "0") not in ("", "0")


def strict_exit_code(figures: Sequence[Figure]) -> int:
    """Return 1 if any goal does not hold, else 0."""
    return int(any(figure.holds is False for figure in figures))


def format_number(value: float | None) -> str:
    """Return a number as people read it: thousands separated, about three significant digits after that."""
    if value is None or math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


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

    def add_text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def add_figures(self, figures: Sequence[Figure]) -> None:
        """Add figures as a table with their goals."""
        marks = {True: '<span class="good">✓ holds</span>', False: '<span class="bad">✗ missed</span>', None: ""}
        rows = [
            [
                escape(figure.name),
                f"<b>{format_number(figure.value)}</b> {escape(figure.unit)}",
                "" if figure.goal is None else escape(str(figure.goal)),
                marks[figure.holds],
            ]
            for figure in figures
        ]
        self._add_rows(["Figure", "Value", "Goal", ""], rows)

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Add a table; numbers are formatted and aligned right."""
        self._add_rows(header, [[_cell(value) for value in row] for row in rows], _number_columns(rows))

    def add_plot(self, svg: str) -> None:
        """Add a plot."""
        self._parts.append(f"<figure>{svg}</figure>")

    def write(self, path: Path) -> None:
        """Write the page in one step."""
        body = "\n".join(self._parts)
        _write_text(path, _PAGE.format(title=escape(self._title), style=_STYLE, body=body))

    def _add_rows(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()
    ) -> None:
        def line(tag: str, cells: Sequence[str]) -> str:
            number = ' class="number"'
            return "".join(f"<{tag}{number * (n in right)}>{cell}</{tag}>" for n, cell in enumerate(cells))

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        head = line("th", [escape(name) for name in header])
        self._parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')


def line_plot(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    markers: Sequence[Marker] = (),
    *,
    dots: bool = True,
) -> str:
    """
    Draw lines as SVG.

    Args:
        title: Shown above the plot.
        x_label: Name and unit of the x axis.
        y_label: Name and unit of the y axis, which starts at 0.
        series: At most as many as there are colours, 4; a legend is drawn from 2 on.
        markers: Vertical lines with a label.
        dots: Whether points get dots, with their values as tooltip.
    """
    points = [point for line in series for point in line.points]
    if not points:
        return _empty_plot(title)
    xs = [x for x, _ in points] + [marker.x for marker in markers]
    axes = _Axes(min(xs), max(xs), max(y for _, y in points))
    parts = [axes.draw(x_label, y_label)]
    for number, line in enumerate(series, start=1):
        path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="line c{number}" points="{path}"/>')
        if dots:
            parts += [
                f'<circle class="dot c{number}" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="3">'
                f"<title>{escape(line.name)}: {format_number(y)} at {format_number(x)}</title></circle>"
                for x, y in line.points
            ]
    parts += _draw_markers(axes, markers)
    if len(series) > 1:
        parts.append(_legend([line.name for line in series]))
    return _svg(title, parts)


def histogram(title: str, x_label: str, values: Sequence[float], bins: int = 20) -> str:
    """Draw the distribution of values as SVG, in bins of equal width from 0 or the smallest to the largest value."""
    if not values:
        return _empty_plot(title)
    low, high = min(0.0, *values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    axes = _Axes(low, low + bins * width, max(counts))
    parts = [axes.draw(x_label, "count")]
    for number, count in enumerate(counts):
        left, right = axes.x(low + number * width), axes.x(low + (number + 1) * width)
        top = axes.y(count)
        span = f"{format_number(low + number * width)} to {format_number(low + (number + 1) * width)}"
        parts.append(
            f'<rect class="bar c1" x="{left + 1:.1f}" y="{top:.1f}" width="{max(right - left - 2, 1):.1f}" '
            f'height="{axes.y(0) - top:.1f}"><title>{span}: {count}</title></rect>'
        )
    return _svg(title, parts)


_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 44, 48


class _Axes:
    """Maps values to positions in the drawing; the y axis starts at 0."""

    def __init__(self, x_min: float, x_max: float, y_max: float) -> None:
        self._x_min = x_min
        self._x_span = (x_max - x_min) or 1.0
        self._x_max = x_min + self._x_span
        self._y_ticks = ticks(0.0, y_max if y_max > 0 else 1.0)
        self._y_top = max(self._y_ticks[-1], y_max)

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x_min) / self._x_span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._y_top * (_HEIGHT - _TOP - _BOTTOM)

    def draw(self, x_label: str, y_label: str) -> str:
        floor = self.y(0)
        parts = []
        for value in self._y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
        for value in ticks(self._x_min, self._x_max):
            if self._x_min <= value <= self._x_max:
                text = f"{value:,.6g}"
                parts.append(f'<text x="{self.x(value):.1f}" y="{floor + 18:.1f}" text-anchor="middle">{text}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor:.1f}" y2="{floor:.1f}"/>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        parts.append(f'<text x="{_LEFT}" y="{_TOP - 12}" text-anchor="start">{escape(y_label)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return round positions (1, 2 or 5 times a power of ten apart) that cover [low, high]."""
    raw = (high - low) / about or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _draw_markers(axes: _Axes, markers: Sequence[Marker]) -> list[str]:
    """Draw all lines before the labels, which have an outline that hides what they cross."""
    lines, labels = [], []
    for row, marker in enumerate(markers):
        x = axes.x(marker.x)
        anchor, text_x = ("end", x - 5) if x > _WIDTH * 0.7 else ("start", x + 5)
        text_y = _TOP + 12 + row % 4 * 15
        lines.append(f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{axes.y(0):.1f}"/>')
        labels.append(
            f'<text class="marked" x="{text_x:.1f}" y="{text_y}" text-anchor="{anchor}">{escape(marker.label)}</text>'
        )
    return lines + labels


def _legend(names: Sequence[str]) -> str:
    parts = []
    right = _WIDTH - _RIGHT
    for number, name in reversed(list(enumerate(names, start=1))):
        parts.append(f'<text x="{right}" y="{_TOP - 12}" text-anchor="end">{escape(name)}</text>')
        right -= 7 * len(name) + 18
        parts.append(f'<rect class="bar c{number}" x="{right}" y="{_TOP - 21}" width="10" height="10"/>')
        right -= 14
    return "".join(parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    heading = f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>'
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg {view} role="img" aria-label="{escape(title)}">{heading}{"".join(parts)}</svg>'


def _empty_plot(title: str) -> str:
    middle = f'x="{_WIDTH / 2}" y="{_HEIGHT / 2}"'
    return _svg(title, [f'<text {middle} text-anchor="middle">nothing was measured</text>'])


def _cell(value: object) -> str:
    if value is None:
        return format_number(None)
    return format_number(value) if isinstance(value, int | float) else escape(str(value))


def _number_columns(rows: Sequence[Sequence[object]]) -> frozenset[int]:
    columns = list(zip(*rows, strict=True))
    return frozenset(n for n, column in enumerate(columns) if any(isinstance(value, int | float) for value in column))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


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
.dot.c1, .bar.c1 { fill: var(--c1); } .dot.c2, .bar.c2 { fill: var(--c2); }
.dot.c3, .bar.c3 { fill: var(--c3); } .dot.c4, .bar.c4 { fill: var(--c4); }
"""
