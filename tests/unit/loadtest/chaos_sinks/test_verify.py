"""The comparison of the chaos test finds every kind of wrong output."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.chaos_sinks.verify import Verdict, batches, verdict

FILES = [[("a", 1), ("b", 5), ("a", 2)], [("a", 4)]]


def record(key: str, n: int, s: int, before: int, now: int) -> dict[str, Any]:
    return {"k": key, "n": n, "s": s, "before": before, "now": now}


RIGHT = [record("a", 2, 3, 0, 11), record("b", 1, 5, 0, 12), record("a", 3, 7, 11, 13)]


def test_undisturbed_output_is_right() -> None:
    """Nothing is found."""
    assert verdict(FILES, RIGHT, in_order=True) == Verdict(0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (RIGHT[:2], Verdict(lost=1, twice=0, wrong=0, parted=0, out_of_order=0)),
        ([*RIGHT, RIGHT[1]], Verdict(lost=0, twice=1, wrong=0, parted=1, out_of_order=0)),
        ([*RIGHT, record("b", 2, 9, 12, 14)], Verdict(lost=0, twice=0, wrong=1, parted=0, out_of_order=0)),
        ([*RIGHT[:2], record("a", 3, 7, 99, 13)], Verdict(lost=0, twice=0, wrong=0, parted=1, out_of_order=0)),
        ([RIGHT[2], *RIGHT[:2]], Verdict(lost=0, twice=0, wrong=0, parted=0, out_of_order=1)),
    ],
)
def test_wrong_output_is_found(records: list[dict[str, Any]], expected: Verdict) -> None:
    """Lost, doubled and foreign records, random numbers of another attempt, and a wrong order."""
    assert verdict(FILES, records, in_order=True) == expected


def test_batches_may_have_several_files() -> None:
    """A batch has the files after those of the batch before it; what no batch has read is expected all the same."""
    files = [[("a", number)] for number in range(5)]
    assert batches(files, [0, 2, 3]) == [[("a", 0)], [("a", 1), ("a", 2)], [("a", 3)], [("a", 4)]]
    assert batches(files, [0, 0, 4]) == [[("a", 0)], [("a", number) for number in range(1, 5)]]
