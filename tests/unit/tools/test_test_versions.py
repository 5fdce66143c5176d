"""The run of tests on other Spark versions: its environments, and its reading of pytest's output."""

from __future__ import annotations

from pathlib import Path

from tools.test_versions import Outcome, _count, declared, environments, figures

OUTPUT = """
....F
=========================== short test summary info ============================
FAILED tests/e2e/test_job.py::test_a - assert 5 passed in mind
2 failed, 71 passed, 1 error in 397.27s (0:06:37)
"""


def test_environments_lie_beside_this_one(tmp_path: Path) -> None:
    """The environment of a version is named after the one that it extends."""
    for name in ("venv", "venv-spark-4.1", "venv-spark-4.2", "other-spark-4.0"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/python").touch()

    found = environments(tmp_path / "venv/bin/python")

    assert found == {version: tmp_path / f"venv-spark-{version}/bin/python" for version in ("4.1", "4.2")}


def test_summary_is_counted() -> None:
    """The numbers are those of pytest's last line; without it no test has passed."""
    assert _count(OUTPUT, ("passed",)) == 71
    assert _count(OUTPUT, ("failed", "error", "errors")) == 3
    assert _count("killed\n", ("passed",)) == 0


def test_run_without_tests_is_a_miss() -> None:
    """A version on which no test ran is a failure, whatever its exit code."""
    missed = [figure.name for figure in figures([Outcome("4.1", 0, 0, 1.0, 0, "")]) if figure.holds is False]

    assert missed == ["PySpark 4.1: tests passed"]


def test_versions_are_pinned() -> None:
    """Each declared version has a requirements file with hashes."""
    for version in declared():
        text = Path(__file__).resolve().parents[3].joinpath(f"requirements-spark-{version}.txt").read_text()
        assert f"pyspark=={version}." in text
        assert "--hash=sha256:" in text
