"""
Applies each patch of ``tests/mutations``, which removes the fix of a defect, and runs the test that must detect it.

A patch begins with a head, followed by the output of ``git diff``::

    # item: A1
    # what: A snapshot's file gets a key that was used before.
    # test: tests/unit/dstl_service/test_x.py::test_y

The patch is applied in a copy of the tree, never in the tree itself. A mutant is *killed* if the test runs and fails.
The run fails if a patch does not apply, or its test cannot run or passes. Writes ``reports/mutants.json``; with
STRICT=1 it also fails unless at least one mutant per item is killed.
"""

from __future__ import annotations

import argparse
import enum
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.reporting.figures import Figure, Goal
from tools.reporting.target import TargetReport, positive

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900
_TESTS_FAILED = 1
"""Pytest's exit code for tests that ran and failed; higher ones mean that none could run."""
_FIELD = re.compile(r"# (item|what|test): (.+)")
_FIELDS = ("item", "what", "test")


class Outcome(enum.StrEnum):
    """Result of a mutant."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    NOT_APPLIED = "DOES NOT APPLY"
    NOT_RUN = "TEST CANNOT BE RUN"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A patch, the defect that it restores, and the test that must fail with it."""

    path: Path
    item: str
    what: str
    test: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a mutant, and the output of its test."""

    mutant: Mutant
    outcome: Outcome
    output: str


def read_mutant(path: Path) -> Mutant:
    """
    Read a patch's head.

    Raises:
        ValueError: A line of the head is missing or repeated.
    """
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _FIELD.fullmatch(line.strip())
        if match is None:
            if line.startswith(("diff ", "--- ")):
                break
            continue
        if match[1] in fields:
            raise ValueError(f"{path.name} has two lines '# {match[1]}:'")
        fields[match[1]] = match[2]
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise ValueError(f"{path.name} lacks the line '# {missing[0]}: ...' before its diff")
    return Mutant(path, **fields)


def read_mutants(folder: Path, only: Collection[str] = ()) -> list[Mutant]:
    """Return the mutants of a folder by item and name; with `only`, those of these items."""
    mutants = [read_mutant(path) for path in folder.glob("*.patch")]
    return sorted(
        (mutant for mutant in mutants if not only or mutant.item in only),
        key=lambda it: (_order(it.item), it.path.name),
    )


def copy_tree(root: Path, target: Path) -> None:
    """Copy all files that are or would be committed, and make a repository of them, since tests need one."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in listing.split("\0"):
        if name and (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    if (root / ".stack").is_dir():  # servers built for tests
        (target / ".stack").symlink_to(root / ".stack")
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)
    subprocess.run(["git", "add", "--all"], cwd=target, check=True)


def try_mutant(mutant: Mutant, root: Path, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Apply a patch in a copy of the tree, and run its test there."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(root, tree)
        apply = ["git", "apply", str(mutant.path.resolve())]
        applied = subprocess.run(apply, cwd=tree, check=False, capture_output=True, text=True)
        if applied.returncode:
            return Verdict(mutant, Outcome.NOT_APPLIED, applied.stderr)
        # The environment has the original's packages; the copy precedes them.
        # The model check and the simulation find a defect for sure only in many schedules.
        environment = {
            "DSTL_MODELCHECK_SCHEDULES": "5000",
            "DSTL_SIMULATION_RUNS": "120",
            **os.environ,
            "PYTHONPATH": str(tree),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", mutant.test]
        try:
            ran = subprocess.run(
                command, cwd=tree, check=False, capture_output=True, text=True, env=environment, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return Verdict(mutant, Outcome.NOT_RUN, f"not done within {timeout_s} s")
        return Verdict(mutant, _outcome(ran.returncode, ran.stdout), ran.stdout + ran.stderr)


def _outcome(exit_code: int, output: str) -> Outcome:
    if exit_code == 0:
        return Outcome.SURVIVED
    # A fixture's error has the exit code of a failed test.
    has_failed = exit_code == _TESTS_FAILED and re.search(r"^FAILED ", output, re.MULTILINE) is not None
    is_import = re.search(
        r"^FAILED .* - (ImportError|ModuleNotFoundError|SyntaxError|NameError)\b", output, re.MULTILINE
    )
    return Outcome.KILLED if has_failed and not is_import else Outcome.NOT_RUN


def figures_of(verdicts: Sequence[Verdict]) -> list[Figure]:
    """Return the figures: mutants not killed, and those killed per item."""
    killed = [verdict for verdict in verdicts if verdict.outcome is Outcome.KILLED]
    figures = [
        Figure("mutants", len(verdicts), "patches", Goal(">=", 1)),
        Figure("mutants not killed", len(verdicts) - len(killed), "patches", Goal("==", 0)),
    ]
    for item in sorted({verdict.mutant.item for verdict in verdicts}, key=_order):
        count = sum(verdict.mutant.item == item for verdict in killed)
        figures.append(Figure(f"{item} killed", count, "patches", Goal(">=", 1)))
    return figures


def describe(verdict: Verdict) -> str:
    """Return a mutant's line of the table."""
    mutant = verdict.mutant
    return f"{mutant.item:5} {verdict.outcome:18} {mutant.path.name:42} {mutant.test}"


def _order(item: str) -> tuple[str, int]:
    """Order A2 before A10."""
    match = re.fullmatch(r"(\D*)(\d*)(.*)", item)
    assert match is not None
    return match[1], int(match[2] or 0)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Try all mutants and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--only", default="", help="items, separated by commas")
    parser.add_argument("--jobs", type=positive, default=1, help="mutants that run in parallel (default %(default)s)")
    options = parser.parse_args(arguments)
    wanted = {item for item in options.only.split(",") if item}
    mutants = read_mutants(root / "tests" / "mutations", wanted)
    if unknown := wanted - {mutant.item for mutant in mutants}:  # a run without mutants would pass
        parser.error(f"no patch in tests/mutations has the item {', '.join(sorted(unknown))}")
    report = TargetReport("mutants", root / "reports")
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda mutant: try_mutant(mutant, root), mutants):
            print(describe(verdict), flush=True)
            if verdict.outcome is not Outcome.KILLED:
                print(verdict.mutant.what, verdict.output, sep="\n")
            verdicts.append(verdict)
    exit_code = report.write(figures_of(verdicts))
    are_killed = all(verdict.outcome is Outcome.KILLED for verdict in verdicts)
    print(f"{sum(verdict.outcome is Outcome.KILLED for verdict in verdicts)} of {len(verdicts)} mutants killed")
    return int(not are_killed) or exit_code


if __name__ == "__main__":
    sys.exit(main())
