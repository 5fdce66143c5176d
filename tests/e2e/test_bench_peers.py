"""`make bench-peers`, in its short form: this project's own side does the job, and every key is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.peers import __main__ as bench_peers
from loadtest.peers.measuring import Shape

pytestmark = pytest.mark.e2e


def test_own_side_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Row API has its figures, and no key is wrong; tests of the harness itself have the kills."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_peers, "SHAPES_SHORT", (Shape(4_000, 200),))

    assert bench_peers.main(["--short", "--strict"]) == 0
    rows = json.loads((tmp_path / "reports" / "bench-peers.json").read_text(encoding="utf-8"))
    found = {row["name"]: row["value"] for row in rows}
    assert found["Row API, 200 keys: wrong keys"] == 0
    assert found["Row API, 200 keys: rate"] > 0
    assert found["Row API, 200 keys: checkpoint, median"] > 0
