"""A cluster of three hosts with standbys, whose executors are killed; the long form is ``make bench-recovery``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_killed_executor_costs_no_restore(tmp_path: Path) -> None:
    """
    I14, I16: partitions of a killed executor go on where their copies are, and every batch's output is right.

    What their tables lack is read, not what they hold; afterwards all tables have complete copies again.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "loadtest.bench_recovery", "--short"]

    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=540)

    figures = json.loads((tmp_path / "reports" / "bench-recovery.json").read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert [figure["name"] for figure in figures if figure["holds"] is False] == []
    assert values["wrong batches, with standbys"] == values["wrong batches, without standbys"] == 0
    assert (
        values["restored at a SIGKILL, most, with standbys"] < values["restored at a SIGKILL, most, without standbys"]
    )
    assert values["complete copies after the last kill"] == values["partitions"]
