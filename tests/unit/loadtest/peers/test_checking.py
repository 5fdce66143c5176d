"""Rows of an engine: a key that lost or doubled an event is found, repeated rows are not held against it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.peers.checking import rows_of_files, wrong_keys

_RIGHT = [(0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (_RIGHT, 0),
        ([*_RIGHT, *_RIGHT], 0),  # rows come again after a kill
        (_RIGHT[:-1], 1),  # an event is lost
        ([*_RIGHT, (0, 3)], 1),  # an event counts twice
        ([*_RIGHT, (7, 1)], 1),  # a key that nobody sent
        ([], 2),
    ],
)
def test_wrong_keys_are_counted(rows: list[tuple[int, int]], wrong: int) -> None:
    """The last count of each key must be the number of its events."""
    assert wrong_keys(rows, events=4, keys=2) == wrong


def test_rows_of_all_kinds_of_files(tmp_path: Path) -> None:
    """Headers, quotes and further columns are skipped, as are cut lines and files that are not committed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "part-0.csv").write_text('"k","n","s"\n"1","2","3.5"\n3,4\n5,', encoding="ascii")
    (tmp_path / "a" / ".part-1.inprogress").write_text("6,7\n", encoding="ascii")
    (tmp_path / "a" / "_SUCCESS").write_text("8,9\n", encoding="ascii")

    assert list(rows_of_files(tmp_path)) == [(1, 2), (3, 4)]
