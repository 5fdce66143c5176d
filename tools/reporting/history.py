"""Histories: values over time or size that a run has recorded, with what happened meanwhile, as JSON and as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tools.reporting.plots import Marker, Series, line_plot

_DOTS_MAX = 60
"""A line of more points has none drawn."""
_POINTS_MAX = 1_000
"""More points than a plot is pixels wide say nothing more."""


@dataclass(frozen=True, slots=True)
class History:
    """
    A plot's content.

    Args:
        title: Of the plot.
        x_label: Name and unit of the x axis.
        y_label: Name and unit of the y axis.
        series: 1 to 4 lines.
        markers: Named positions on the x axis.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    markers: tuple[Marker, ...] = ()

    def svg(self) -> str:
        """Return the plot."""
        dots = all(len(line.points) <= _DOTS_MAX for line in self.series)
        return line_plot(self.title, self.x_label, self.y_label, self.series, self.markers, dots=dots)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it; of many points every n-th, and the highest between two of them."""
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "series": [{"name": line.name, "points": _thinned(line)} for line in self.series],
            "markers": [{"x": marker.x, "label": marker.label} for marker in self.markers],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """
        Read what `to_dict` returned.

        Raises:
            ValueError: It is something else; says what.
        """
        try:
            series = [
                Series(str(line["name"]), [(float(x), float(y)) for x, y in line["points"]])
                for line in values["series"]
            ]
            markers = [Marker(float(one["x"]), str(one["label"])) for one in values["markers"]]
            texts = str(values["title"]), str(values["x"]), str(values["y"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no history: {type(error).__name__}: {error}") from error
        return cls(*texts, tuple(series), tuple(markers))


def _thinned(line: Series) -> list[tuple[float, float]]:
    """Return few enough points; the peaks stay, as they are what one looks for."""
    step = -(-len(line.points) // _POINTS_MAX)
    parts = (line.points[begin : begin + step] for begin in range(0, len(line.points), step or 1))
    return [max(part, key=lambda point: point[1]) for part in parts]
