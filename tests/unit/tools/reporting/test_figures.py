"""Figures and their goals, and the JSON file of a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.reporting.figures import (
    Figure,
    Goal,
    Relation,
    format_number,
    percentile,
    strict_exit_code,
    write_report_json,
)


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
def test_goal_is_relation_to_bound(relation: Relation, value: Any, expected: Any) -> None:
    """A goal includes its bound; a figure without a value never reaches it."""
    assert Goal(relation, 3).holds(value) is expected


def test_strict_exit_code_reports_missed_goal() -> None:
    """Only a missed goal gives exit code 1; figures without a goal do not count."""
    good = [Figure("a", 1, "ms", Goal("<=", 2)), Figure("b", None, "ms")]

    assert strict_exit_code(good) == 0
    assert strict_exit_code([*good, Figure("c", 3, "ms", Goal("<=", 2))]) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_has_null_for_non_finite_values(tmp_path: Path, value: Any) -> None:
    """With a value that is not a finite number, the file is still valid for every parser."""
    write_report_json(tmp_path / "a.json", [Figure("a", value, "ms", Goal("<=", 2))])

    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    [row] = json.loads(text, parse_constant=pytest.fail)
    assert (row["value"], row["holds"]) == (None, False)


def test_json_has_one_object_per_figure(tmp_path: Path) -> None:
    """Each figure is written with name, value, unit, goal and whether it is met; the folder is created."""
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
def test_percentile_has_nearest_rank(values: Any, percent: float, expected: Any) -> None:
    """A percentile is the value with rank ceil(percent / 100 * n)."""
    assert percentile(list(values), percent) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (1234567, "1,234,567"), (1234.56, "1,235"), (123.45, "123.5"), (0.01234, "0.0123")],
)
def test_numbers_are_readable(value: Any, text: str) -> None:
    """Numbers have thousands separators and about three decimals."""
    assert format_number(value) == text
