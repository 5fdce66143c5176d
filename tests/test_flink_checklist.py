"""The tests that docs/flink-checklist.md names exist, and its rows are in order."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (TESTS.parent / "docs/flink-checklist.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| Flink's class")
]


def test_named_tests_exist() -> None:
    """Every scenario names tests that are there, or says why it does not apply."""
    missing = []
    for _, scenario, shown in ROWS:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", shown)
        assert named or shown.startswith("does not apply: "), scenario
        for file, name in named:
            path = TESTS / file
            if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
                missing.append(f"{file}::{name}")
    assert missing == []


def test_rows_are_sorted() -> None:
    """Rows are sorted by class and scenario, each once, so that one is found and two additions do not meet."""
    keys = [(flink_class.startswith("*"), flink_class, scenario) for flink_class, scenario, _ in ROWS]
    assert keys == sorted(set(keys))
