"""The harness of `make bench-peers`, with a job of its own: rates, usage, kills and failures."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from loadtest.peers.checking import rows_of_files, wrong_keys
from loadtest.peers.engines import JOBS
from loadtest.peers.running import Command, PeerError, Run, rows_made, steady_rate

_KEYS, _EVENTS = 100, 20_000
# Counts in memory, keeps its state and its place every 1,000 events, and goes on from there.
_JOB = f"""
import json, os, pathlib, subprocess, sys, time
from progress import Progress, key_of
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
kept, progress = folder / "kept", Progress(folder)
at, counts = json.loads(kept.read_text()) if kept.exists() else (0, [0] * {_KEYS})
(folder / "out").mkdir(exist_ok=True)
with (folder / "out" / "rows.csv").open("a") as rows:
    while at < {_EVENTS}:
        for at in range(at + 1, at + 1001):
            key = key_of(at - 1, {_KEYS})
            counts[key] += 1
            rows.write(f"{{key}},{{counts[key]}}\\n")
        rows.flush()
        new = folder / "new"
        new.write_text(json.dumps([at, counts]))
        os.replace(new, kept)
        progress.add(1000)
        time.sleep(0.05)
progress.end()
child.kill()
"""


def _run(folder: Path, program: str = _JOB) -> Run:
    return Run([Command([sys.executable, "-c", program, str(folder)], {"PYTHONPATH": str(JOBS)}, folder)], folder)


def test_run_to_the_end_is_measured(tmp_path: Path) -> None:
    """A job that ends by itself has a rate, CPU time and memory, and every key is right."""
    run = _run(tmp_path)
    run.execute(60, lambda: False)

    rate = steady_rate(tmp_path)
    assert rate is not None
    assert 1_000 < rate < 25_000  # at least 50 ms per 1,000 rows
    assert rows_made(tmp_path) == _EVENTS
    assert run.usage.cpu_s > 0
    assert run.usage.memory_bytes > 5e6
    assert wrong_keys(rows_of_files(tmp_path / "out"), _EVENTS, _KEYS) == 0


def test_kill_ends_every_process_of_a_run(tmp_path: Path) -> None:
    """A killed run is gone with its children amid its rows; the next one goes on, and every key is right."""
    killed = _run(tmp_path)
    killed.execute(60, lambda: rows_made(tmp_path) >= _EVENTS // 4, signal.SIGKILL)

    at, _ = json.loads((tmp_path / "kept").read_text(encoding="utf-8"))
    assert 0 < at < _EVENTS
    assert killed.processes() == []
    assert wrong_keys(rows_of_files(tmp_path / "out"), _EVENTS, _KEYS) > 0
    _run(tmp_path).execute(60, lambda: False)
    assert wrong_keys(rows_of_files(tmp_path / "out"), _EVENTS, _KEYS) == 0


def test_failed_job_says_why(tmp_path: Path) -> None:
    """A program that fails ends the run with the end of its log, and one that never ends is given up."""
    with pytest.raises(PeerError, match="no such engine"):
        _run(tmp_path, "raise SystemExit('no such engine')").execute(60, lambda: False)
    with pytest.raises(PeerError, match="has not ended after"):
        _run(tmp_path, "import time; time.sleep(600)").execute(0.5, lambda: False)
