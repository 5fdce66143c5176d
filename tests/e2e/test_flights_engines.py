"""The flights job on both engines, over the first weeks of the data, in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.flights.answer import answer, differences
from examples.flights.data import prepare, read_flights, read_weather
from examples.flights.files import RouteFiles, read_lines
from examples.flights.job import ENGINES
from examples.flights.processes import ROOT, Layout, stop_sidecar

FILES = 2


@pytest.mark.spark
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_gives_batch_answer(local_dir: Path, engine: str) -> None:
    """I14: the same job ends with the batch answer on the changelog backend and on Spark's own operator."""
    flights, weather = read_flights().iloc[:4_000], read_weather().iloc[:400]
    layout = Layout(local_dir)
    prepare(layout.data, flights, weather, FILES)
    command = [sys.executable, "-m", "examples.flights.job", "--engine", engine]
    for name in ("data", "checkpoint", "output", "storage", "local_dir", "events", "figures"):
        command += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
    try:
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    finally:
        stop_sidecar(layout)

    assert finished.returncode == 0, finished.stderr[-3000:]
    assert [line["batch_id"] for line in read_lines(layout.events)] == list(range(FILES))
    assert len(read_lines(layout.figures)) == (FILES if engine == "changelog" else 0)
    assert differences(answer(flights, weather), RouteFiles(layout.output).latest()) == []
