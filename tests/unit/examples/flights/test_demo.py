"""The timing of the demo's kills, and its evaluation of a run's files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from examples.flights import demo, processes
from examples.flights.files import append_line
from examples.flights.processes import DriverProcess, Layout, running_batch, sidecar_pid
from examples.flights.report import DemoRun, Kill, figures_of, read_checkpoint_figures, write_html
from tools.reporting.figures import Figure, Goal


@pytest.fixture
def run() -> DemoRun:
    events = [{"batch_id": n, "duration_ms": 500, "recorded_s": 1000.0 + n} for n in range(4)]
    lines = [{"batch_id": n, "checkpoint_ms": 10.0 + n, "bytes": 1000, "objects": 2, "rows": 50} for n in range(4)]
    kills = [Kill("driver", 1, 1000.5, 1001.0), Kill("sidecar", 2, 1001.5, 1002.0)]
    output = pd.DataFrame([("EWR", "IAH", 6, 1, 13.4, 40, None, 10.0, 20.0, 40.0)], columns=flights_columns())
    return DemoRun("changelog", 200, 4, 999.0, 1004.0, events, lines, kills, 0, [], output)


def flights_columns() -> list[str]:
    from examples.flights.answer import COLUMNS

    return COLUMNS


def write_logs(checkpoint: Path, offsets: list[str], commits: list[str]) -> None:
    for folder, names in (("offsets", offsets), ("commits", commits)):
        (checkpoint / folder).mkdir(parents=True)
        for name in names:
            (checkpoint / folder / name).touch()


@pytest.mark.parametrize(
    ("offsets", "commits", "expected"),
    [
        ([], [], None),
        (["0"], [], 0),
        (["0"], ["0"], None),
        (["9", "10"], ["9"], 10),
        (["9", "10", ".10.crc"], ["9", "10"], None),
        (["9", ".10.some.tmp"], ["9", ".9.crc"], None),
    ],
)
def test_batch_runs_between_offsets_and_commit(
    tmp_path: Path, offsets: list[str], commits: list[str], expected: Any
) -> None:
    """A batch runs while its offsets are logged and its commit is missing; temporary files do not count."""
    write_logs(tmp_path, offsets, commits)

    assert running_batch(tmp_path) == expected


def test_no_batch_runs_before_first_start(tmp_path: Path) -> None:
    """Before the checkpoint folder exists, no batch runs."""
    assert running_batch(tmp_path / "absent") is None


def test_kill_takes_children_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL ends the driver and, like its JVM, each process that it started."""
    script = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
    real: Any = subprocess.Popen
    monkeypatch.setattr(
        "subprocess.Popen",
        lambda command, **options: real(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=options["start_new_session"]
        ),
    )
    driver = DriverProcess(Layout(tmp_path), "changelog")
    driver.start()
    process = driver._process
    assert process is not None
    assert process.stdout is not None
    with process, process.stdout as output:
        child = int(output.readline())
        driver.kill()

        assert driver.exit_code() == -signal.SIGKILL
        assert output.read() == b""  # ends only when the child, which also holds the pipe, is dead
    assert not os.path.exists(f"/proc/{child}/cmdline") or not Path(f"/proc/{child}/cmdline").read_bytes()


def test_no_sidecar_has_no_pid(tmp_path: Path) -> None:
    """If no sidecar answers, there is none to kill."""
    assert sidecar_pid(Layout(tmp_path)) is None


@pytest.mark.parametrize(
    ("figures", "arguments", "expected"),
    [
        ([Figure("rows", 0, "rows", Goal("==", 0))], ["--strict"], 0),
        ([Figure("rows", 1, "rows", Goal("==", 0))], [], 1),
        ([Figure("rows", 0, "rows", Goal("==", 0)), Figure("slow", 9, "s", Goal("<=", 1))], [], 0),
        (
            [Figure("rows", 0, "rows", Goal("==", 0)), Figure("slow", 9, "s", Goal("<=", 1))],
            ["--strict"],
            1,
        ),
    ],
)
def test_exit_code_reports_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Figure], arguments: list[str], expected: Any
) -> None:
    """Different output always fails; a missed goal fails only in strict mode."""
    monkeypatch.delenv("STRICT", raising=False)
    monkeypatch.setattr(demo, "run_demo", lambda *_: figures)

    assert demo.main(["--work", str(tmp_path), "--reports", str(tmp_path / "reports"), *arguments]) == expected


def test_failed_run_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that cannot continue ends with code 2 and prints where its files are."""

    def fail(*_: object) -> None:
        raise processes.DemoError("the time is over")

    monkeypatch.setattr(demo, "run_demo", fail)

    assert demo.main(["--work", str(tmp_path), "--reports", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().out.replace("\n", "")


def test_last_figures_of_batch_count(tmp_path: Path) -> None:
    """A batch that was executed again has one entry, its last; entries are in the order of batches."""
    for batch_id, size in ((1, 10), (0, 20), (1, 30)):
        append_line(tmp_path / "figures.jsonl", {"batch_id": batch_id, "bytes": size})

    found = read_checkpoint_figures(tmp_path / "figures.jsonl")

    assert [(line["batch_id"], line["bytes"]) for line in found] == [(0, 20), (1, 30)]


def test_good_run_reaches_all_goals(run: DemoRun) -> None:
    """A run that survived both kills with identical output misses no goal, and its figures are correct."""
    figures = {figure.name: figure for figure in figures_of(run)}

    assert all(figure.holds is not False for figure in figures.values())
    assert figures["throughput in batches"].value == 100
    assert figures["time to resume after driver kill"].value == 0.5
    assert figures["checkpoint latency p99"].value == 13.0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"differences": ["a row"]}, "output rows that differ"),
        ({"kills": []}, "driver kills survived"),
        ({"kills": [Kill("driver", 1, 1000.5, 1001.0), Kill("sidecar", 2, 1001.5)]}, "sidecar kills survived"),
        ({"unplanned_restarts": 1}, "unplanned driver restarts"),
        ({"ended_s": 1300.0}, "run time"),
        ({"checkpoints": []}, "checkpoints"),
    ],
)
def test_every_failure_misses_goal(run: DemoRun, change: Any, name: str) -> None:
    """Differences, a kill that was not survived, an unexpected restart and slowness each miss a goal."""
    for field, value in change.items():
        setattr(run, field, value)

    assert name in [figure.name for figure in figures_of(run) if figure.holds is False]


def test_report_shows_run(run: DemoRun, tmp_path: Path) -> None:
    """The page has the kills, the figures and the routes, and loads nothing from another host."""
    write_html(tmp_path / "demo.html", run, figures_of(run))

    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    for text in ("driver killed in batch 1", "sidecar killed in batch 2", "EWR → IAH", "identical", "objects per"):
        assert text in page
    assert "http" not in page
