"""The short form of the service's figures: they are measured and reported, whatever their values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_service

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

EXPECTED = {
    # beginning of the name: (unit, goal)
    "disk, plain 10 MB files": ("MB/s", None),
    "disk, 1 MB sets: durable": ("MB/s", None),
    "disk, 1 MB sets: share": ("ratio", ">= 0.6"),
    "disk, 1 MB sets: CPU": ("s/GB", None),
    "disk, 4 KB sets: durable": ("1/s", ">= 4,000"),
    "S3, plain boto3": ("MB/s", None),
    "S3, 1 MB sets: durable": ("MB/s", None),
    "S3, 1 MB sets: share": ("ratio", ">= 0.8"),
    "S3, 1 MB sets: CPU": ("s/GB", None),
    "64 partitions: objects per checkpoint": ("objects", "<= 2.20"),
    "restore of own key groups: per CPU second": ("MB/s", ">= 150"),
    "restore of half of the key groups: per CPU second": ("MB/s", ">= 60"),
}


def test_short_form_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of ingest, objects and restore is in the report with its unit and goal, and has a value."""
    monkeypatch.chdir(tmp_path)

    assert bench_service.main(["--only", "ingest,objects,restore", "--short"]) == 0

    rows = json.loads((tmp_path / "reports/bench-service.json").read_text())
    for begin, (unit, goal) in EXPECTED.items():
        (row,) = [row for row in rows if row["name"].startswith(begin) and row["unit"] == unit]
        assert (row["goal"], row["holds"]) == (goal, None if goal is None else row["holds"])
        assert row["value"] > 0
    # The number of objects and the tables do not depend on the machine's speed.
    assert [row["value"] for row in rows if row["name"].endswith("tables that are right")] == [1, 1]
    assert [row["holds"] for row in rows if row["name"].endswith("objects per checkpoint")] == [True]


def test_unknown_figure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """For an unknown figure, the error lists the known ones."""
    with pytest.raises(SystemExit):
        bench_service.main(["--only", "nothing"])

    assert "hedging, outage, ingest" in capsys.readouterr().err
