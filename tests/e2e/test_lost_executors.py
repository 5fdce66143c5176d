"""Executors that die while a batch's output is read; the long form is ``make chaos-blocks``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

KILLS = 2


def test_output_and_state_are_of_one_attempt(tmp_path: Path) -> None:
    """I18: random numbers in the output equal those in the state, whenever an executor with blocks is killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "loadtest.chaos_blocks", "--kills", str(KILLS)]

    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=840)

    figures = json.loads((tmp_path / "reports" / "chaos-blocks.json").read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert [figure["name"] for figure in figures if figure["holds"] is False] == []
    assert values["kills between two actions"] == values["kills between two operators"] == KILLS // 2
    assert values["batches executed again"] > 0
