"""The report of `make bench-peers`: ratios against peers, engines that are missing, kills that cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.peers import __main__ as bench_peers
from loadtest.peers.engines import ENGINES, OURS, Engine
from loadtest.peers.measuring import Result, Shape
from loadtest.peers.running import PeerError
from tools.servers.programs import ServerError

_RATES = {"Row API": 100_000.0, "Quix Streams": 50_000.0}


@pytest.fixture(autouse=True)
def _engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the place of the runs: Bytewax cannot be installed, and Quix Streams does not come back after a kill."""

    def measured(engine: Engine, shape: Shape) -> Result:
        if engine.name == "Bytewax":
            raise ServerError("no such package")
        return Result(shape.events, _RATES[engine.name], 12.0, 345.0, None, 0)

    def killed(engine: Engine, shape: Shape, usual_s: float) -> int:
        if engine.name == "Quix Streams":
            raise PeerError("it has not ended after 900 s")
        return 0

    monkeypatch.chdir(tmp_path)
    for name in ("SHORT", "STRICT", "ONLY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bench_peers, "measured", measured)
    monkeypatch.setattr(bench_peers, "wrong_after_kill", killed)


def _found(tmp_path: Path) -> dict[str, Any]:
    rows = json.loads((tmp_path / "reports" / "bench-peers.json").read_text(encoding="utf-8"))
    return {row["name"]: (row["value"], row["holds"]) for row in rows}


def test_ratios_have_goals(tmp_path: Path) -> None:
    """A ratio stands for each shape that both have; a missed one fails the strict run."""
    assert bench_peers.main(["--only", "Row API,Quix Streams", "--strict"]) == 1

    found = _found(tmp_path)
    assert found["Row API against Quix Streams, 20,000 keys"] == (2.0, False)
    assert found["Row API, 20,000 keys: wrong keys after a SIGKILL"] == (0, True)
    assert found["Quix Streams, 200,000 keys: rate"] == (50_000, None)


def test_what_could_not_be_done_is_named(tmp_path: Path) -> None:
    """An engine without environment is left out, a failed kill keeps the other figures, and the page says why."""
    bench_peers.main(["--only", "Bytewax,Quix Streams"])

    found = _found(tmp_path)
    assert found["Bytewax, 20,000 keys: left out, see the page"] == (None, None)
    assert found["Quix Streams, 20,000 keys: rate"] == (50_000, None)
    assert not any("Bytewax" in name and "rate" in name for name in found)
    page = (tmp_path / "reports" / "bench-peers.html").read_text(encoding="utf-8")
    assert "no such package" in page
    assert "it has not ended after 900 s" in page


def test_short_form_runs_only_ours(tmp_path: Path) -> None:
    """With SHORT=1 no peer is started or installed."""
    bench_peers.main(["--short"])

    assert {name.split(",")[0] for name in _found(tmp_path)} == {"Row API"}


def test_every_engine_says_what_differs() -> None:
    """Each engine has a line on what is not comparable, and each peer has pinned requirements with hashes."""
    for engine in ENGINES.values():
        assert engine.differs
        assert (engine.name in OURS) == (not engine.requirements)
        if engine.requirements:
            pins = Path(bench_peers.__file__).with_name(f"requirements-{engine.requirements}.txt").read_text()
            lines = [line for line in pins.splitlines() if "==" in line]
            assert lines
            assert pins.count("--hash=sha256:") >= len(lines)
            assert "://" not in pins
            assert "--index" not in pins
