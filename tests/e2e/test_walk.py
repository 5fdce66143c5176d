"""A change's path through the files, traced on a real run: it stays short, and `DESIGN.md` draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.walk.__main__ import LEGS, Stop, entered_again, files_of, record

DESIGN = (Path(__file__).resolve().parents[2] / "DESIGN.md").read_text(encoding="utf-8")
STATIONS = {
    "append": {"overlay", "sealed", "request", "received"},
    "flush": {"request", "requested", "stored"},
    "complete": {"request", "stored"},
    "restore": {"request", "table"},
}


@pytest.fixture(scope="module")
def way() -> list[Stop]:
    return record()


def test_every_station_is_seen(way: list[Stop]) -> None:
    """The trace contains each station of each leg, so the tests below do not pass on an empty trace."""
    assert {leg: {stop.station for stop in way if stop.leg == leg} for leg in LEGS} == STATIONS


def test_from_the_update_to_the_manifest(way: list[Stop]) -> None:
    """A change passes at most 22 files."""
    files = files_of(way, LEGS[:3])
    assert len(files) <= 22, files


def test_back_into_the_table(way: list[Stop]) -> None:
    """Its restore adds few more files."""
    assert len(files_of(way, LEGS)) <= 27


def test_no_file_is_entered_twice(way: list[Stop]) -> None:
    """No call returns to a file that it came through."""
    assert entered_again(way) == []


def test_design_draws_each_file(way: list[Stop]) -> None:
    """The drawing in the design names the files of the trace."""
    drawing = DESIGN.partition("## The path of a change")[2].partition("## Where to find it")[0]
    missing = [file for file in files_of(way, LEGS) if Path(file).stem not in drawing]
    # Tests store to a folder, production to S3.
    assert missing == ["storage/local_store.py"]
