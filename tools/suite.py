"""
``python -m tools.suite -- PYTEST_ARGS``: runs all tests, then those that failed again, alone.

This distinguishes a flaky test from a permanent defect, and shows both: a test that failed and then passed alone is
named at the end, for investigation. The second run follows only a first one that ended by itself with a few failures;
it has one process and the first run's seed. The last line is pytest's own summary.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

AGAIN_MAX = 5
"""More failures than this mean a defect, or a machine that cannot run the tests."""
TESTS_FAILED = 1
"""Pytest's exit code when it ran all tests and some failed."""
_AGAIN = ("--numprocesses=0", "--last-failed", "--last-failed-no-failures", "none", "--randomly-seed=last")
_SUMMARY = re.compile(r"=* ?(.*\bin [\d.]+s\b.*?) ?=*")


@dataclass(frozen=True, slots=True)
class Run:
    """
    Result of a run of pytest.

    Args:
        exit_code: Pytest's exit code.
        failed: The tests that did not pass.
        summary: Pytest's last line, without the frame.
    """

    exit_code: int
    failed: frozenset[str]
    summary: str


def is_worth_another(run: Run) -> bool:
    """Return whether to run the failed tests again: all of them are known, and they are few."""
    return run.exit_code == TESTS_FAILED and 0 < len(run.failed) <= AGAIN_MAX


def report(first: Run, second: Run) -> list[str]:
    """Return the lines about both runs; the last one is the summary of the second run."""
    passed = first.failed - second.failed if second.exit_code in (0, TESTS_FAILED) else frozenset()
    return [
        f"first run: {first.summary}",
        *(f"failed, then passed alone: {test}" for test in sorted(passed)),
        *(f"failed, and not passed alone: {test}" for test in sorted(first.failed - passed)),
        *(["a test that failed once has a defect, in the code or in the test: investigate it"] if passed else []),
        f"result: {'passed' if second.exit_code == 0 else 'failed'}; the second run of what failed:",
        second.summary,
    ]


def run_suite(arguments: Sequence[str], folder: Path | None = None) -> int:
    """Run all tests, then a few failed ones again; print the results, and return an exit code."""
    with tempfile.TemporaryDirectory(prefix="dstl-suite-") as cache:  # failures of other runs do not count
        first = _run(arguments, Path(cache), folder)
        if not is_worth_another(first):
            return first.exit_code
        sys.stdout.write(f"\n{len(first.failed)} tests failed; running them again, alone.\n\n")
        second = _run([*arguments, *_AGAIN], Path(cache), folder)
    sys.stdout.write("\n" + "\n".join(report(first, second)) + "\n")
    sys.stdout.flush()
    return second.exit_code


def summary_of(lines: Sequence[str]) -> str:
    """Return pytest's summary, or a replacement."""
    found = (_SUMMARY.fullmatch(line.strip()) for line in reversed(lines))
    return next((match[1] for match in found if match), "it ended without a summary")


def _run(arguments: Sequence[str], cache: Path, folder: Path | None) -> Run:
    command = [sys.executable, "-u", "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]  # progress is seen at once
    lines = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    return Run(process.returncode, frozenset(_failed(cache)), summary_of(lines))


def _failed(cache: Path) -> Collection[str]:
    try:
        found: dict[str, bool] = json.loads((cache / "v/cache/lastfailed").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    return found.keys()


if __name__ == "__main__":
    sys.exit(run_suite([argument for argument in sys.argv[1:] if argument != "--"]))
