"""
``python -m tools.test_versions``: runs tests on the older minor versions of Spark that are supported.

Each has an environment of its own (``make versions``): this one with another Spark on top. The short form, one query
and the private interfaces, is part of the suite (``tests/e2e/test_versions.py``); the long one is all end-to-end tests
and the differential ones. Writes ``reports/test-versions.json``; STRICT=1 makes a failure fail.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, is_set

ROOT = Path(__file__).resolve().parent.parent
SHORT = (
    "tests/e2e/test_private_interfaces.py",
    "tests/e2e/on_each_version.py",
)
LONG = ("tests/e2e", "--ignore=tests/e2e/test_versions.py", "--ignore=tests/e2e/test_chaos.py")
TIMEOUT_S = 3 * 3600
# Older versions leave a socket to Python's garbage collector, which warns about Spark's code.
_OPTIONS = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnraisableExceptionWarning", "-q")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run of pytest on a version."""

    version: str
    passed: int
    failed: int
    seconds: float
    exit_code: int
    output: str


def environments(python: Path = Path(sys.executable)) -> dict[str, Path]:
    """Return the interpreters of the installed versions' environments, by version."""
    environment = python.parent.parent
    found = sorted(environment.parent.glob(f"{environment.name}-spark-*/bin/python"))
    return {path.parent.parent.name.rpartition("-")[2]: path for path in found}


def declared() -> list[str]:
    """Return the versions that have pinned requirements."""
    return sorted(path.stem.rpartition("-")[2] for path in ROOT.glob("requirements-spark-*.txt"))


def run(version: str, python: Path, tests: Sequence[str], *, quiet: bool = False) -> Outcome:
    """Run tests on a version; print their output meanwhile unless `quiet`."""
    started = time.monotonic()
    variables = {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
    unwanted = ("SPARK_HOME", "SPARK_CONF_DIR", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID")
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    command = [str(python), "-m", "pytest", *_OPTIONS, *tests]
    done = subprocess.Popen(
        command, cwd=ROOT, env=inherited | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.stdout is not None
    lines = []
    with done:
        for line in done.stdout:
            lines.append(line)
            if not quiet:
                sys.stdout.write(f"{version}: {line}")
    output = "".join(lines)
    passed, failed = (_count(output, words) for words in (("passed",), ("failed", "error", "errors")))
    return Outcome(version, passed, failed, time.monotonic() - started, done.returncode, output)


def _count(output: str, words: Sequence[str]) -> int:
    summary = next((line for line in reversed(output.splitlines()) if re.search(r"\bin [\d.]+s\b", line)), "")
    return sum(int(number) for number, word in re.findall(r"(\d+) (\w+)", summary) if word in words)


def figures(outcomes: Sequence[Outcome]) -> list[Figure]:
    """Return the figures of the runs."""
    found = []
    for outcome in outcomes:
        name = f"PySpark {outcome.version}"
        found += [
            Figure(f"{name}: tests passed", outcome.passed, "tests", Goal(">=", 1)),
            Figure(f"{name}: tests failed", outcome.failed, "tests", Goal("==", 0)),
            Figure(f"{name}: exit code of the run", outcome.exit_code, "", Goal("==", 0)),
            Figure(f"{name}: run time", round(outcome.seconds, 1), "s"),
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests on all versions, or the selected ones; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="versions, separated by commas")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest")
    given = parser.parse_args(arguments)
    found = environments()
    wanted = [version for version in given.only.split(",") if version] or declared()
    if missing := [version for version in wanted if version not in found]:
        sys.stderr.write(f"No environment for PySpark {', '.join(missing)}: run make versions.\n")
        return 2
    tests = SHORT if is_set("SHORT") else LONG
    report = TargetReport("test-versions", ROOT / "reports")
    outcomes = [run(version, found[version], [*tests, *given.pytest]) for version in wanted]
    exit_code = report.write(figures(outcomes))
    for outcome in outcomes:
        sys.stdout.write(
            f"PySpark {outcome.version}: {outcome.passed} passed, {outcome.failed} failed in {outcome.seconds:.0f} s\n"
        )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
