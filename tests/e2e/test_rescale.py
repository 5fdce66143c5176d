"""Operators change their parallelism while their query runs, on a cluster whose partitions are pinned to executors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_running_query_is_rescaled(tmp_path: Path, local_dir: Path) -> None:
    """I2, I14: 2 -> 5 -> 1 -> 3 partitions without a stop: every key's rows are processed once, with its state."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "tests.e2e.rescale_program", "--folder", str(tmp_path)]

    subprocess.run([*command, "--local-dir", str(local_dir)], cwd=tmp_path, env=environment, check=True, timeout=400)
