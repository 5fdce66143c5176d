"""The reports of make targets that measure, and that each of them writes one."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TARGETS, TargetReport, is_set, positive

ROOT = Path(__file__).resolve().parents[4]
MISSED = Figure("losses", 1, "sets", Goal("==", 0))
HELD = Figure("losses", 0, "sets", Goal("==", 0))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRICT", raising=False)


@pytest.mark.parametrize(
    ("figure", "variable", "strict", "expected"),
    [
        (MISSED, None, None, 0),
        (MISSED, "", None, 0),
        (MISSED, "0", None, 0),
        (MISSED, "1", None, 1),
        (HELD, "1", None, 0),
        (MISSED, None, True, 1),
        (MISSED, "1", False, 0),
    ],
)
def test_missed_goal_fails_in_strict_mode(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
    variable: str | None,
    strict: bool | None,
    expected: Any,
) -> None:
    """With STRICT=1 or the caller's own option, a missed goal gives exit code 1; the file always reports it."""
    if variable is not None:
        monkeypatch.setenv("STRICT", variable)
    report = TargetReport("bench", tmp_path, strict=strict)

    assert report.write([figure]) == expected
    [row] = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert row == {"name": "losses", "value": figure.value, "unit": "sets", "goal": "== 0", "holds": figure is HELD}


def test_run_that_fails_leaves_no_earlier_report(tmp_path: Path) -> None:
    """A run first deletes the previous report; what it has written so far stays."""
    TargetReport("load", tmp_path).write([HELD])

    report = TargetReport("load", tmp_path)
    assert not report.path.exists()
    report.write([HELD])
    report.write([HELD, MISSED])
    assert len(json.loads(report.path.read_text(encoding="utf-8"))) == 2


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    """A report that no target of the Makefile writes is refused."""
    with pytest.raises(ValueError, match="target 'benches' does not measure"):
        TargetReport("benches", tmp_path)


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_variable_is_set_unless_empty_or_zero(monkeypatch: pytest.MonkeyPatch, value: Any, expected: Any) -> None:
    """SHORT= and SHORT=0 mean the same as no SHORT, because make passes unset variables as empty ones."""
    if value is not None:
        monkeypatch.setenv("STRICT", value)

    assert is_set("STRICT") is expected


def test_every_target_that_measures_writes_its_report() -> None:
    """Each target is in the Makefile, and one place in the code writes its report."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    written = Counter(
        ast.literal_eval(node.args[0])
        for folder in ("examples", "loadtest", "tools", "tests/e2e")
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "TargetReport"
    )

    assert set(TARGETS) <= set(re.findall(r"^([a-z0-9-]+):.*##", makefile, re.MULTILINE))
    assert written == dict.fromkeys(TARGETS, 1)


@pytest.mark.parametrize("text", ["0", "-3", "x", "1.5", ""])
def test_nothing_is_no_number_of_tries(text: str) -> None:
    """A run that tries nothing would hold all of its goals."""
    assert positive("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match=f"at least 1, not '{text}'"):
        positive(text)
