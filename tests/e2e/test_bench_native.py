"""`make bench-native`, with few rows: every line can be measured, and its two sides agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench_native.settings import PATH, spark_settings

pytestmark = pytest.mark.spark


def test_native_operators_are_compared(tmp_path: Path) -> None:
    """Each side has a median, the ratios their goals, and both sides the same output."""
    command = [sys.executable, "-m", "loadtest.bench_native", "--only", "small,deduplication,join", "--short"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "reports/bench-native.json").read_text(encoding="utf-8"))
    values = {figure["name"].partition(": ")[2]: figure["value"] for figure in figures[:6]}  # those of the first line
    assert values["Spark / DSTL"] == pytest.approx(values["Spark, median trigger"] / values["DSTL, median trigger"])
    assert values["DSTL / floor"] == pytest.approx(values["DSTL, median trigger"] / values["floor, median trigger"])
    assert [figure["goal"] for figure in figures if figure["unit"] == "ratio"] == [
        ">= 1.10",
        "<= 1.20",
        ">= 1.30",
        ">= 1.20",
    ]
    assert [figure["value"] for figure in figures if figure["unit"] == "rows"] == [0, 0, 0]


def test_every_setting_has_a_reason() -> None:
    """The file of settings says why each one is there; one without a reason is refused."""
    settings = list(spark_settings(PATH.read_text(encoding="utf-8")))
    assert {"spark.sql.shuffle.partitions", "spark.sql.streaming.stateStore.providerClass"} <= {
        setting.name for setting in settings
    }
    assert all(len(setting.reason) > 20 for setting in settings)
    with pytest.raises(ValueError, match=r"spark\.b needs a value, and its reason"):
        list(spark_settings("# Why.\nspark.a 1\n\nspark.b 2\n"))
