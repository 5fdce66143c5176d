"""A heat map as SVG: one cell per row and column, the stronger the larger its value, in the colours of its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from html import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 158, 92, 52, 30
_LABEL_PX = 52
"""Least distance of labels below the columns."""
_LABEL_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 240)
_FAINTEST = 0.1
_LEGEND_STEPS = 6


def heat_map(
    title: str,
    rows: Mapping[str, str],
    columns: Mapping[str, str],
    values: Mapping[tuple[str, str], int],
    show: Callable[[int], str] = str,
) -> str:
    """
    Draw a value per row and column, and the sum of each row.

    A cell has its row, column and value as data attributes, so that others can read what the map shows. A row and
    column without a value has no cell; values below 0 are in the colour of what is bad.

    Args:
        title: Shown above the map.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns, from left to right; as many are shown as there is room for.
        values: By row and column.
        show: Writes a value, for tooltips and sums.
    """
    width = (_WIDTH - _LEFT - _RIGHT) / max(len(columns), 1)
    strongest = max(map(abs, values.values()), default=0) or 1
    lefts = {column: _LEFT + number * width for number, column in enumerate(columns)}
    parts = [f'<text class="title" x="0" y="16">{escape(title)}</text>']
    parts.append(f'<text x="{_WIDTH}" y="{_TOP - 10}" text-anchor="end">sum</text>')
    parts += _legend(show(0), show(strongest))
    for number, (row, label) in enumerate(rows.items()):
        top = _TOP + number * _ROW
        found = {column: values[row, column] for column in columns if (row, column) in values}
        parts.append(f'<text x="{_LEFT - 10}" y="{top + 19}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<text x="{_WIDTH}" y="{top + 19}" text-anchor="end">{escape(show(sum(found.values())))}</text>')
        for column, value in found.items():
            strength = _strength(abs(value) / strongest)
            parts.append(
                f'<rect class="{"bad" if value < 0 else "bar c1"}" x="{lefts[column]:.1f}" y="{top}" '
                f'width="{max(width - 1, 1):.1f}" height="{_ROW - 2}" fill-opacity="{strength:.2f}" '
                f'data-row="{escape(row)}" data-column="{escape(column)}" data-value="{value}">'
                f"<title>{escape(label)}, {escape(columns[column])}: {escape(show(value))}</title></rect>"
            )
    bottom = _TOP + len(rows) * _ROW
    every = next((step for step in _LABEL_STEPS if step * width >= _LABEL_PX), len(columns))
    for column, label in list(columns.items())[:: every or 1]:
        parts.append(f'<text x="{lefts[column]:.1f}" y="{bottom + 16}">{escape(label)}</text>')
    view = f'viewBox="0 0 {_WIDTH} {bottom + 24}"'
    return f'<svg {view} role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _strength(share: float) -> float:
    """Return how strong a value is drawn: by its root, so that one large value does not hide all others."""
    return _FAINTEST + (1 - _FAINTEST) * math.sqrt(share)


def _legend(least: str, most: str) -> list[str]:
    """Draw what the colours mean, right of the title."""
    step = 16
    left = _WIDTH - 7 * len(most) - 8 - step * _LEGEND_STEPS
    return [
        f'<text x="{left - 8}" y="16" text-anchor="end">{escape(least)}</text>',
        *(
            f'<path class="bar c1" d="M{left + number * step} 6h{step - 1}v11h-{step - 1}z" '
            f'fill-opacity="{_strength(number / (_LEGEND_STEPS - 1)):.2f}"/>'
            for number in range(_LEGEND_STEPS)
        ),
        f'<text x="{_WIDTH}" y="16" text-anchor="end">{escape(most)}</text>',
    ]
