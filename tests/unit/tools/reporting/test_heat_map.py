"""The heat map shows each value where it belongs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

from tools.reporting.heat_map import heat_map

ROWS, COLUMNS = {"1": "Ann & Co", "2": "Bob"}, {"a": "09:00", "b": "09:01"}


def test_cells_have_their_values() -> None:
    """A cell is the stronger the larger its value, and absent without one; rows have their sums."""
    svg = ET.fromstring(heat_map("Sales", ROWS, COLUMNS, {("1", "a"): 50, ("1", "b"): 100, ("2", "b"): -25}))
    cells = {(cell.get("data-row"), cell.get("data-column")): cell for cell in svg.iter("rect")}
    texts = [text.text for text in svg.iter("text")]

    assert {place: cell.get("data-value") for place, cell in cells.items()} == {
        ("1", "a"): "50",
        ("1", "b"): "100",
        ("2", "b"): "-25",
    }
    strength = {place: float(cell.get("fill-opacity") or 0) for place, cell in cells.items()}
    assert 1 == strength["1", "b"] > strength["1", "a"] > strength["2", "b"] > 0
    assert cells["2", "b"].get("class") == "bad"
    assert {"Ann & Co", "150", "-25", "09:00"} <= set(texts)
    assert cells["1", "a"][0].text == "Ann & Co, 09:00: 50"


def test_labels_do_not_overlap() -> None:
    """If there are many columns, only as many labels are shown as there is room for."""
    columns = {str(number): f"{number:02d}:00" for number in range(120)}

    xs = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="\d+">', heat_map("", {"1": "x"}, columns, {}))]

    labels = sorted(xs)[1:]
    assert len(labels) > 5
    assert min(right - left for left, right in pairwise(labels)) >= 40


def test_map_of_nothing() -> None:
    """Without rows and columns it is still a drawing."""
    assert ET.fromstring(heat_map("Sales", {}, {}, {})).tag == "svg"
