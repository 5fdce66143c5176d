"""
The change-data example in its short form: PostgreSQL, Kafka, the query, three kills, and all comparisons.

A failure means that a record was lost, published twice or out of order, or that a total is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_pipeline_is_killed_and_agrees_with_its_database(tmp_path: Path) -> None:
    """I14: what is published is what the database has, each record once, and dirty records are dead letters once."""
    command = [sys.executable, "-m", "tools.servers.beside", sys.executable, "-m", "examples.merchant_orders.demo"]
    done = subprocess.run(
        [*command, "--reports", str(tmp_path), "--timeout-s", "480", "--orders", "200"],
        cwd=ROOT,
        env={**os.environ, "SHORT": "1"},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    figures = {row["name"]: row for row in json.loads((tmp_path / "demo-cdc.json").read_text(encoding="utf-8"))}
    excused = {"run time until all programs have ended"}  # says more about the machine than about the code
    if version("pyspark").startswith("4.1."):
        excused.add("unplanned restarts of the job")  # its Kafka source fails after a batch it repeats
    assert [row for name, row in figures.items() if row["holds"] is False and name not in excused] == []
    assert figures["orders in the database"]["value"] > 100
    assert figures["dirty records sent"]["value"] > 10
    assert "Database, topic, Parquet files and chart agree." in (tmp_path / "demo-cdc.html").read_text(encoding="utf-8")
