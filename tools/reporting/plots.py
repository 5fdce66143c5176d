"""Plots as SVG, in the colours of their page, so that they are readable in light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tools.reporting.figures import format_number

Point = tuple[float, float]


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
    """Draw all lines before the labels, whose outline hides the lines under them."""
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
