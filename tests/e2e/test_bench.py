"""`make bench`, `bench-restart` and `bench-rescale`, with few rows: every line can be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.servers.spark.classes import class_archive

pytestmark = pytest.mark.spark


def test_line_is_measured_on_both_sides(tmp_path: Path) -> None:
    """A line has two medians and their ratio with its goal, in the report and on the terminal."""
    command = [sys.executable, "-m", "loadtest.bench", "--only", "columnar", "--short"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "reports/bench.json").read_text(encoding="utf-8"))
    assert [figure["unit"] for figure in figures] == ["ms", "ms", "ratio"]
    theirs, ours, ratio = (figure["value"] for figure in figures)
    assert ratio == pytest.approx(theirs / ours)
    assert figures[2]["goal"] == ">= 40"
    assert "Row API" in done.stdout


def test_unknown_line_is_refused(tmp_path: Path) -> None:
    """An unknown name ends the run at once with the list of valid names."""
    command = [sys.executable, "-m", "loadtest.bench", "--only", "nothing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "many-keys" in done.stderr


def test_starts_of_a_driver_are_measured(tmp_path: Path) -> None:
    """Drivers go on from their state on both sides, one of them with an archive of classes that the command made."""
    command = [sys.executable, "-m", "loadtest.bench_restart", "--short", "--archive", str(class_archive())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "reports/bench-restart.json").read_text(encoding="utf-8"))
    assert [figure["unit"] for figure in figures] == ["s", "s", "s", "ratio", "ratio"]
    theirs, ours, archived, *ratios = (figure["value"] for figure in figures)
    assert ratios == [pytest.approx(ours / theirs), pytest.approx(archived / theirs)]


def test_batches_of_a_rescaled_query_are_measured(tmp_path: Path) -> None:
    """The query switches twice, every batch counts its rows once, and the page has a plot."""
    command = [sys.executable, "-m", "loadtest.bench_rescale", "--short"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "reports/bench-rescale.json").read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values["batches with another count than their rows"] == 0
    assert values["switches"] == 2
    assert {"batch that switches to 8 / median", "batch that switches to 3 / median"} < values.keys()
    assert "<svg" in (tmp_path / "reports/bench-rescale.html").read_text(encoding="utf-8")


def test_samples_of_a_long_run_are_taken(tmp_path: Path) -> None:
    """All batches run, and each kind of process, the bucket and the local disk are measured in each third of them."""
    command = [sys.executable, "-m", "loadtest.soak", "--batches", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    figures = json.loads((tmp_path / "reports/soak.json").read_text(encoding="utf-8"))
    values = {figure["name"]: figure["value"] for figure in figures}
    assert values.pop("batches") == 6
    medians = {name.partition(",")[0]: value for name, value in values.items() if name.endswith("of the last third")}
    assert set(medians) == {
        "batch",
        *(f"memory (RSS) of {kind}" for kind in ("the driver", "the JVM", "the workers", "the sidecar")),
        "heap of the JVM",
        "objects in the bucket",
        "bytes in the bucket",
        "local disk",
    }
    assert min(medians.values()) > 0
