"""Reads the files of a make target in the folder of reports. They may be absent, cut off or of another kind."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.reporting.history import History
from tools.reporting.plots import Point, Series

_LOAD_PERCENTS = ("50%", "95%", "99%")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as its report has it; the goal is text."""

    name: str
    value: float | None
    unit: str
    goal: str | None
    holds: bool | None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Read an object of a report; `ValueError` if it is none."""
        value, goal, holds = values.get("value"), values.get("goal"), values.get("holds")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (value is None or is_number) or not (holds is None or isinstance(holds, bool)) or "name" not in values:
            raise ValueError(f"no figure: {str(values)[:80]}")
        number = None if value is None else float(value)
        return cls(str(values["name"]), number, str(values.get("unit", "")), None if goal is None else str(goal), holds)


@dataclass(frozen=True, slots=True)
class Found:
    """
    The results of a target, as far as they exist.

    Args:
        target: The make target.
        rows: Its figures; None if it has not run, or its report cannot be read.
        about: The versions and the machine of the run; None if that was not recorded.
        histories: What it has recorded over time.
        problem: Why something cannot be shown, or an empty text.
    """

    target: str
    rows: tuple[Row, ...] | None = None
    about: dict[str, Any] | None = None
    histories: tuple[History, ...] = ()
    problem: str = ""

    @property
    def goals(self) -> tuple[int, int]:
        """How many goals hold, and how many there are."""
        verdicts = [row.holds for row in self.rows or () if row.holds is not None]
        return sum(verdicts), len(verdicts)


def read_target(folder: Path, target: str) -> Found:
    """Read the files of a target."""
    try:
        rows = _rows(folder / f"{target}.json")
        about = _about(folder / f"{target}.about.json")
        histories = _histories(folder / f"{target}.history.json")
        if target == "load":
            histories += _load_history(folder / "load")
    except (ValueError, OSError, KeyError) as error:
        return Found(target, problem=f"its report cannot be read: {error}")
    return Found(target, rows, about, histories)


def _rows(path: Path) -> tuple[Row, ...] | None:
    values = _json(path)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise ValueError(f"{path.name} is not a list of figures")
    return tuple(Row.from_dict(one) for one in values)


def _about(path: Path) -> dict[str, Any] | None:
    values = _json(path)
    if values is None:
        return None
    if not isinstance(values, dict) or not all(isinstance(values.get(one), dict) for one in ("versions", "machine")):
        raise ValueError(f"{path.name} does not say what the report was made with")
    return {**values, "command": str(values["command"]), "begun": str(values["begun"])}


def _histories(path: Path) -> tuple[History, ...]:
    values = _json(path) or []
    if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
        raise ValueError(f"{path.name} is not a list of histories")
    return tuple(History.from_dict(one) for one in values)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _load_history(folder: Path) -> tuple[History, ...]:
    """Return the latencies over time in the table that locust writes every second; nothing if there is none."""
    lines: dict[str, list[Point]] = defaultdict(list)
    for path in sorted(folder.glob("*_stats_history.csv"))[:1]:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("Name") in ("checkpoint", "Aggregated")]
        begun = float(rows[0]["Timestamp"]) if rows else 0.0
        names = {row["Name"] for row in rows}
        wanted = "checkpoint" if "checkpoint" in names else "Aggregated"
        for row in rows:
            _add_load_points(lines, row, begun, wanted)
    series = tuple(Series(name, points) for name, points in lines.items())
    title = "load: latency of requests, of the last ten seconds"
    return (History(title, "seconds since the start", "ms", series),) if series else ()


def _add_load_points(lines: dict[str, list[Point]], row: Mapping[str, str], begun: float, wanted: str) -> None:
    for percent in _LOAD_PERCENTS:
        text = row.get(percent, "")
        if row["Name"] == wanted and text.replace(".", "", 1).isdigit():
            lines[f"p{percent[:-1]}"].append((float(row["Timestamp"]) - begun, float(text)))
