"""How the flights example stores its output, and its progress lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from examples.flights.files import RouteFiles, append_line, read_lines


class Batch:
    """Replaces the DataFrame of a batch: `RouteFiles` uses only its Arrow table."""

    def __init__(self, rows: list[dict[str, object]]) -> None:
        self._table = pa.Table.from_pylist(rows)

    def toArrow(self) -> pa.Table:
        return self._table


def save(output: RouteFiles, rows: list[dict[str, object]], batch_id: int) -> None:
    batch: Any = Batch(rows)
    output.save(batch, batch_id)


def test_batch_executed_again_replaces_its_output(tmp_path: Path) -> None:
    """Saving a batch twice leaves one file with the rows of the second time."""
    output = RouteFiles(tmp_path)
    save(output, [{"origin": "EWR", "dest": "IAH", "flights": 1}], 0)
    save(output, [{"origin": "EWR", "dest": "IAH", "flights": 2}], 0)

    assert [path.name for path in tmp_path.iterdir()] == ["batch-00000000.parquet"]
    assert output.latest()["flights"].to_list() == [2]


def test_last_batch_of_route_wins(tmp_path: Path) -> None:
    """The output is the last row of each route by batch order, not by write order."""
    output = RouteFiles(tmp_path)
    save(output, [{"origin": "EWR", "dest": "IAH", "flights": 9}], 10)
    save(output, [{"origin": "LGA", "dest": "MIA", "flights": 4}, {"origin": "EWR", "dest": "IAH", "flights": 5}], 9)

    assert output.latest().to_dict("records") == [
        {"origin": "EWR", "dest": "IAH", "flights": 9},
        {"origin": "LGA", "dest": "MIA", "flights": 4},
    ]


def test_half_written_line_is_left_out(tmp_path: Path) -> None:
    """A line left incomplete by a killed writer does not hide the others."""
    path = tmp_path / "events.jsonl"
    append_line(path, {"batch_id": 0})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"batch_id": 1, "ro')

    assert read_lines(path) == [{"batch_id": 0}]
    assert read_lines(tmp_path / "absent.jsonl") == []
