"""Measured figures and their goals, and the JSON file for machines. Nothing here reads that file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Relation = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure's goal: its relation to a bound."""

    relation: Relation
    bound: float

    def holds(self, value: float | None) -> bool:
        """Return whether a value reaches the goal; None, not measured, does not."""
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


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the nearest-rank percentile: of n values in ascending order the one with rank ceil(percent / 100 * n)."""
    if not values:
        return None
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]


def write_report_json(path: Path, figures: Sequence[Figure]) -> None:
    """
    Write figures as a list of objects with name, value, unit, goal (text or null) and holds (null without goal).

    A value that is not finite, which JSON cannot express, is null.
    """
    rows = [
        {
            "name": figure.name,
            "value": figure.value if figure.value is not None and math.isfinite(figure.value) else None,
            "unit": figure.unit,
            "goal": None if figure.goal is None else str(figure.goal),
            "holds": figure.holds,
        }
        for figure in figures
    ]
    write_text(path, json.dumps(rows, indent=2) + "\n")


def strict_exit_code(figures: Sequence[Figure]) -> int:
    """Return 1 if any goal does not hold, else 0."""
    return int(any(figure.holds is False for figure in figures))


def format_number(value: float | None) -> str:
    """Return a readable number: thousands separated, about three significant digits."""
    if value is None or math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
