"""Processes that die while output is published; the long form is ``make chaos-sinks``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_committed_output_is_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """
    I14, I18: one kill at each step of publishing to Kafka; nothing is lost, doubled or parted.

    An executor and a sidecar are killed at random moments.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "loadtest.chaos_sinks", "--systems", "kafka", "--hits", "1", "--random", "2"]

    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=840)

    figures = json.loads((tmp_path / "reports" / "chaos-sinks.json").read_text(encoding="utf-8"))
    assert [figure["name"] for figure in figures if figure["holds"] is False] == []
    assert sum(figure["value"] for figure in figures if ": kills" in figure["name"]) >= 9
