"""`make bench-growth`, with few rows: the curve and the memory of a large batch can be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from loadtest.bench.growth import Stage, growth, memory, stages

pytestmark = pytest.mark.spark


def test_stages_fill_and_measure() -> None:
    """Batches of new keys fill each size, and batches of known keys measure it; batch numbers are consecutive."""
    assert stages((100, 500), rows=200, measured=7) == [
        Stage(0, 1, 0, 100, 100),
        Stage(1, 7, 0, 0, 100),
        Stage(8, 2, 100, 400, 500),
        Stage(10, 7, 0, 0, 500),
    ]


def test_curve_has_a_point_per_size(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has rows per second at each size, and the share that the largest size keeps, with its goal."""
    monkeypatch.chdir(tmp_path)
    figures, [history] = growth(spark, tmp_path / "growth", (200, 600), rows=400, touched=200, measured=2)

    assert [figure.unit for figure in figures] == ["rows/s", "rows/s", "ratio"]
    small, large = figures[0].value, figures[1].value
    assert small is not None
    assert large is not None
    assert figures[2].value == pytest.approx(large / small)
    assert [x for x, _ in history.series[0].points] == [200, 600]
    assert (tmp_path / "reports" / "bench-growth.html").exists()


def test_memory_of_a_large_batch_is_measured(spark: SparkSession, tmp_path: Path) -> None:
    """All rows pass through one worker, the large key's in one call, within the memory bound."""
    figures = memory(spark, tmp_path, rows=50_000, key_rows=10_000)

    assert [figure.holds for figure in figures] == [True, True, True]
