"""A cluster of four hosts with standbys, which lose executors; the long form is ``make bench-recovery``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.servers.network import why_no_network

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

WAYS = ("process killed", "host cut off") if why_no_network() is None else ("process killed",)
"""A host can be cut off only where network namespaces can be made."""
HELD_MB = 1.0
"""The content of the tables of one host."""


def test_lost_executor_costs_no_restore(tmp_path: Path) -> None:
    """
    I14, I16: partitions of a killed executor go on where their copies are, and every row has its output, once.

    What their tables lack is read, not what they hold; afterwards all tables have complete copies again. A host that
    is cut off is noticed by its silence, although nothing is closed.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, "-m", "loadtest.bench_recovery", "--short"]
    command += ["--columns", "exact+standby", "--ways", ",".join(WAYS)]

    with tempfile.TemporaryDirectory(prefix="dstl-", ignore_cleanup_errors=True) as folder:  # short enough for sockets
        subprocess.run([*command, "--folder", folder], cwd=tmp_path, env=environment, check=True, timeout=540)
        log = (Path(folder) / "column-exact+standby" / "driver.log").read_text(encoding="utf-8")

    figures = json.loads((tmp_path / "reports" / "bench-recovery.json").read_text(encoding="utf-8"))
    values = {figure["name"].removeprefix("exact+standby"): figure["value"] for figure in figures}
    assert [figure["name"] for figure in figures if figure["holds"] is False] == []
    assert values[": rows missing"] == values[": rows that are not the next of their key"] == 0
    assert values[", process killed: read by tables, most"] < HELD_MB / 2
    assert all(values[f", {way}: until copies are complete, median"] > 0 for way in WAYS)
    assert ("has fallen silent" in log) == ("host cut off" in WAYS)
    assert "<svg" in (tmp_path / "reports" / "bench-recovery.html").read_text(encoding="utf-8")
    plots = json.loads((tmp_path / "reports" / "bench-recovery.history.json").read_text(encoding="utf-8"))
    assert [plot["title"] for plot in plots] == [f"exact+standby: {way}" for way in WAYS]
