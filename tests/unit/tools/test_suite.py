"""The run of all tests in CI: which failures are repeated, and how they are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.suite import AGAIN_MAX, Run, is_worth_another, report, run_suite, summary_of


def first(count: int, exit_code: int = 1) -> Run:
    """Return a run with this number of failures."""
    return Run(exit_code, frozenset(f"test_{number}" for number in range(count)), f"{count} failed in 9.00s")


@pytest.mark.parametrize("count", range(1, AGAIN_MAX + 1))
def test_few_failures_are_tried_again(count: int) -> None:
    """A completed run with a few failures is followed by a second one."""
    assert is_worth_another(first(count))


@pytest.mark.parametrize(
    "run", [first(AGAIN_MAX + 1), first(0), *(first(1, exit_code) for exit_code in (0, 2, 3, 4, 5, -9, 124))]
)
def test_other_ends_are_final(run: Run) -> None:
    """Many failures, or an incomplete run, are final."""
    assert not is_worth_another(run)


def test_failures_of_both_runs_are_distinguished() -> None:
    """A test that then passed alone is named, and so is one that failed again; the second run's result counts."""
    assert report(first(2), Run(1, frozenset({"test_1"}), "1 failed, 1 passed in 1.00s")) == [
        "first run: 2 failed in 9.00s",
        "failed, then passed alone: test_0",
        "failed, and not passed alone: test_1",
        "a test that failed once has a defect, in the code or in the test: investigate it",
        "result: failed; the second run of what failed:",
        "1 failed, 1 passed in 1.00s",
    ]
    assert report(first(1), Run(0, frozenset(), "1 passed in 1.00s"))[-2:] == [
        "result: passed; the second run of what failed:",
        "1 passed in 1.00s",
    ]


@pytest.mark.parametrize("exit_code", [2, 3, 5, -15])
def test_second_run_without_an_end_shows_nothing_to_pass(exit_code: int) -> None:
    """If the second run was interrupted, or found no test, no test counts as passed."""
    said = report(first(1), Run(exit_code, frozenset(), "it ended without a summary"))

    assert "failed, and not passed alone: test_0" in said
    assert not any("then passed alone" in line for line in said)
    assert said[-2].startswith("result: failed")


def test_summary_is_pytests_last_line() -> None:
    """The frame is removed, and earlier output that looks like a summary is ignored."""
    assert summary_of(["== 1 passed in 2.00s ==\n", "=== 2 failed, 71 passed in 397.27s (0:06:37) ===\n", "\n"]) == (
        "2 failed, 71 passed in 397.27s (0:06:37)"
    )
    assert summary_of(["Killed\n"]) == "it ended without a summary"


TESTS = """
from pathlib import Path

def test_once(): pass

def test_rare():
    marker = Path(__file__).with_name("failed once")
    assert marker.exists() or marker.touch()

def test_never(): assert {never!r} == ""
"""


@pytest.mark.parametrize(("never", "exit_code"), [("", 0), ("a defect", 1)])
def test_rare_failure_passes_and_defect_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, never: str, exit_code: int
) -> None:
    """Pytest runs only the failed tests again, in one process."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "test_it.py").write_text(TESTS.format(never=never), encoding="utf-8")

    assert run_suite(["--numprocesses=1", "test_it.py"], tmp_path) == exit_code
    lines = capsys.readouterr().out.splitlines()

    assert "failed, then passed alone: test_it.py::test_rare" in lines
    assert ("failed, and not passed alone: test_it.py::test_never" in lines) == bool(never)
    assert lines[-1].startswith("1 failed, 1 passed" if never else "1 passed, 2 deselected")
    assert not list(tmp_path.glob(".pytest_cache"))
