"""An executor that hangs for good, without an event; with the recommended settings the query goes on soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def test_query_goes_on_without_a_hung_executor(tmp_path: Path, local_dir: Path) -> None:
    """I2, I14: batches neither wait for Spark's usual time-outs nor lose or repeat a row."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "tests.e2e.hung_executor_program", "--folder", str(tmp_path)]

    subprocess.run([*command, "--local-dir", str(local_dir)], cwd=tmp_path, env=environment, check=True, timeout=280)
