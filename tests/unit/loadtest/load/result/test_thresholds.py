"""Limits of a run's figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.load.result.figures import Samples, figures_of
from loadtest.load.result.thresholds import read_thresholds, thresholds_of, with_thresholds
from loadtest.load.settings import LoadSettings
from storage.errors import InvalidInputError
from tools.reporting.figures import Figure, Goal, strict_exit_code

KNOWN = ["checkpoint latency p99", "failures"]
ROOT = Path(__file__).parents[5]


def test_limits_are_read() -> None:
    """Each name gets its relation and bound."""
    text = '"checkpoint latency p99" = "<= 800.5"  # ms\nfailures = "==0"\n'

    assert thresholds_of(text, KNOWN) == {"checkpoint latency p99": Goal("<=", 800.5), "failures": Goal("==", 0)}


def test_threshold_replaces_goal() -> None:
    """A threshold is its figure's goal, which a figure without a value misses; other figures keep their own."""
    figures = [Figure("a", 5, ""), Figure("b", None, ""), Figure("c", 1, "", Goal("==", 1))]

    assert strict_exit_code(with_thresholds(figures, {"a": Goal("<=", 5)})) == 0
    assert strict_exit_code(with_thresholds(figures, {"a": Goal("<=", 4)})) == 1
    assert strict_exit_code(with_thresholds(figures, {"b": Goal(">=", 0)})) == 1
    assert [figure.goal for figure in with_thresholds(figures, {})] == [None, None, Goal("==", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '"checkpoint latency p98" = "<= 800"',
            "'checkpoint latency p98'; it has\n  checkpoint latency p99\n  failures",
        ),
        ('failures = "< 1"', "the limit of 'failures' must be a text such as \"<= 800\".*got '< 1'"),
        ('failures = "<= many"', "got '<= many'"),
        ("failures = 0", "got 0"),
        ("[failures]\nmax = 0", "got {'max': 0}"),
        ("failures", "not TOML"),
        ("# nothing", "no threshold"),
    ],
)
def test_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """For an unknown name the known ones are listed; a wrong limit, no TOML and an empty file are refused."""
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=message) as caught:
        read_thresholds(file, KNOWN)
    assert str(caught.value).startswith(str(file))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is refused with its name."""
    with pytest.raises(InvalidInputError, match=r"thresholds cannot be read: .*nowhere\.toml"):
        read_thresholds(tmp_path / "nowhere.toml", KNOWN)


@pytest.mark.parametrize("path", sorted((ROOT / "loadtest/thresholds").glob("*.toml")), ids=lambda path: path.stem)
def test_thresholds_of_the_project_name_figures(path: Path) -> None:
    """Each file in `loadtest/thresholds` names figures of runs at the store for which it is."""
    settings = LoadSettings(store=path.stem)

    assert read_thresholds(path, [figure.name for figure in figures_of(Samples(), settings, 0.0)])
