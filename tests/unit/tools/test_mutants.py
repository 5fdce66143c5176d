"""Mutants of a tiny repository: which ones count as killed, and which ones fail the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.mutants import Mutant, Outcome, main, read_mutant, read_mutants, try_mutant

CODE = "def double(number):\n    return number * 2\n"
TEST = """
from code_of_it import double
def test_double():
    assert double(3) == 6
def test_nothing():
    pass
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with one function and its tests, which need no pytest plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    folder = tmp_path / "repository"
    (folder / "tests" / "mutations").mkdir(parents=True)
    (folder / "code_of_it.py").write_text(CODE)
    (folder / "tests" / "test_it.py").write_text(TEST)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return folder


def add(root: Path, name: str, old: str, new: str, test: str = "test_double", item: str = "A1") -> Mutant:
    """Write a patch that changes a line of the function."""
    path = root / "tests" / "mutations" / name
    path.write_text(
        f"# item: {item}\n# what: It is wrong.\n# test: tests/test_it.py::{test}\n"
        "diff --git a/code_of_it.py b/code_of_it.py\n--- a/code_of_it.py\n+++ b/code_of_it.py\n"
        f"@@ -1,2 +1,2 @@\n def double(number):\n-{old}\n+{new}\n"
    )
    return read_mutant(path)


@pytest.mark.parametrize(
    ("old", "new", "test", "outcome"),
    [
        ("    return number * 2", "    return number * 3", "test_double", Outcome.KILLED),
        ("    return number * 2", "    return number + number", "test_double", Outcome.SURVIVED),
        ("    return number * 2", "    return number * 3", "test_nothing", Outcome.SURVIVED),
        ("    return number * 5", "    return number * 3", "test_double", Outcome.NOT_APPLIED),
        ("    return number * 2", "    return number * 3", "test_missing", Outcome.NOT_RUN),
        ("    return number * 2", "    return (", "test_double", Outcome.NOT_RUN),
        ("    return number * 2", "    return nothing", "test_double", Outcome.NOT_RUN),
        ("    return number * 2", "    import nothing_of_this_name", "test_double", Outcome.NOT_RUN),
    ],
)
def test_only_a_test_that_ran_and_failed_kills(root: Path, old: str, new: str, test: str, outcome: Outcome) -> None:
    """A wrong result kills a mutant; one that survives, does not apply or cannot be imported is not killed."""
    assert try_mutant(add(root, "a.patch", old, new, test), root).outcome is outcome
    assert (root / "code_of_it.py").read_text() == CODE


def test_report_names_every_item(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a line per patch, ordered by item; the report has the number of killed mutants per item."""
    add(root, "A10-late.patch", "    return number * 2", "    return 10", item="A10")
    add(root, "A2-early.patch", "    return number * 2", "    return 2", item="A2")

    assert main([], root) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["A2", "A10"]
    figures = {figure["name"]: figure for figure in json.loads((root / "reports" / "mutants.json").read_text())}
    assert all(figure["holds"] for figure in figures.values())
    assert figures["A10 killed"]["value"] == 1


def test_survivor_fails_the_run(root: Path) -> None:
    """One surviving mutant fails the run; a single item can be tried."""
    add(root, "A1-bad.patch", "    return number * 2", "    return 2 * number")
    add(root, "A2-good.patch", "    return number * 2", "    return 2", item="A2")

    assert main(["--jobs", "2"], root) == 1
    assert main(["--only", "A2"], root) == 0


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--only", "A2,A3"], "has the item A3"), (["--jobs", "0"], "at least 1")]
)
def test_arguments_that_cannot_be_are_told(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    """A slip in a name would run nothing, and pass."""
    add(root, "A2-good.patch", "    return number * 2", "    return 2", item="A2")

    with pytest.raises(SystemExit):
        main(arguments, root)

    assert told in capsys.readouterr().err


def test_no_mutants_miss_the_goal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any patch nothing was shown, which STRICT=1 reports as a miss."""
    assert main([], root) == 0
    monkeypatch.setenv("STRICT", "1")
    assert main([], root) == 1


@pytest.mark.parametrize("text", ["# item: A1\n# what: x\ndiff --git a/x b/x\n# test: y\n", "# item: A1\n# item: A1\n"])
def test_incomplete_header_is_refused(tmp_path: Path, text: str) -> None:
    """A patch that lacks or repeats one of its three lines is not a mutant."""
    (tmp_path / "bad.patch").write_text(text)

    with pytest.raises(ValueError, match=r"bad\.patch"):
        read_mutants(tmp_path)
