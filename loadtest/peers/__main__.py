"""
``make bench-peers``: the same job in other engines, on two cores, each in an environment of its own.

Every event updates one state, a count and a sum per key, and makes one row; state is durable about every second. Each
engine runs to the end, and once more with all its processes killed at a random moment. Writes
``reports/bench-peers.json`` and ``reports/bench-peers.html``. With SHORT=1 only this project's Row API runs, and no
process is killed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench_service import line_of
from loadtest.peers.engines import ENGINES, OURS, Engine
from loadtest.peers.measuring import Result, Shape, measured, wrong_after_kill
from loadtest.peers.running import PeerError
from tools.reporting.figures import Figure, Goal
from tools.reporting.page import HtmlReport
from tools.reporting.target import TargetReport, chosen_options
from tools.servers.programs import ServerError

SHAPES = (Shape(2_000_000, 20_000), Shape(2_000_000, 200_000))
SHAPES_SHORT = (Shape(20_000, 2_000),)
_WANTED = {("Row API", "Quix Streams"): (2.2, 2.2), ("Row API", "Bytewax"): (1.0, 1.4)}
"""Least ratio of events per second at 20,000 keys, and at 200,000."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen engines; return the exit code."""
    names, short, strict = chosen_options("Run one job in several engines.", list(ENGINES), arguments, "only ours")
    report, exit_code = TargetReport("bench-peers", strict=strict), 0
    found: dict[tuple[str, int], Result] = {}
    figures: list[Figure] = []
    missing: dict[str, str] = {}
    for name in names if not short else [name for name in names if name == OURS[0]]:
        for number, shape in enumerate(SHAPES_SHORT if short else SHAPES):
            print(f"{name}, {shape.keys:,} keys ...", flush=True)
            try:
                found[name, shape.keys] = measured(ENGINES[name], shape)
                new = _figures(ENGINES[name], shape, found[name, shape.keys])
                _tell(new)
                figures += new
                if number == 0 and not short:
                    new = [_after_kill(ENGINES[name], shape, found[name, shape.keys])]
                    _tell(new)
                    figures += new
            except (PeerError, ServerError) as error:
                missing[f"{name}, {shape.keys:,} keys"] = str(error)
                print(f"  left out: {error}", flush=True)
            exit_code = report.write([*figures, *_ratios(found)])
    _write_page(figures + _ratios(found), found, missing)
    return max(exit_code, report.write([*figures, *_ratios(found), *_left_out(missing)]))


def _figures(engine: Engine, shape: Shape, result: Result) -> list[Figure]:
    name = f"{engine.name}, {shape.keys:,} keys"
    return [
        Figure(f"{name}: rate", result.events_per_s, "events/s"),
        Figure(f"{name}: CPU per million events", result.cpu_s, "s"),
        Figure(f"{name}: memory, most", result.memory_mb, "MB"),
        Figure(f"{name}: checkpoint, median", result.checkpoint_ms, "ms"),
        Figure(f"{name}: wrong keys", result.wrong, "keys", _none_of(engine)),
    ]


def _after_kill(engine: Engine, shape: Shape, result: Result) -> Figure:
    wrong = wrong_after_kill(engine, shape, result.events / result.events_per_s)
    return Figure(f"{engine.name}, {shape.keys:,} keys: wrong keys after a SIGKILL", wrong, "keys", _none_of(engine))


def _none_of(engine: Engine) -> Goal | None:
    """Return the goal of wrong keys: other engines are reported, not judged."""
    return Goal("==", 0) if engine.name in OURS[:2] else None


def _tell(figures: Sequence[Figure]) -> None:
    for figure in figures:
        print(line_of(figure), flush=True)


def _ratios(found: dict[tuple[str, int], Result]) -> list[Figure]:
    figures = []
    for (ours, theirs), wanted in _WANTED.items():
        for shape, least in zip(SHAPES, wanted, strict=True):
            one, other = found.get((ours, shape.keys)), found.get((theirs, shape.keys))
            if one and other:
                name = f"{ours} against {theirs}, {shape.keys:,} keys"
                figures.append(Figure(name, one.events_per_s / other.events_per_s, "x", Goal(">=", least)))
    return figures


def _left_out(missing: dict[str, str]) -> list[Figure]:
    return [Figure(f"{name}: left out, see the page", None, "") for name in missing]


def _write_page(figures: list[Figure], found: dict[tuple[str, int], Result], missing: dict[str, str]) -> None:
    page = HtmlReport("The same job in other engines", "A count and a sum per key, one row per event, two cores.")
    header = ["Engine", "keys", "events", "events/s", "CPU s per million", "MB", "checkpoint ms", "wrong keys"]
    page.add_table(
        header,
        [
            [name, keys, one.events, one.events_per_s, one.cpu_s, one.memory_mb, one.checkpoint_ms, one.wrong]
            for (name, keys), one in found.items()
        ],
    )
    page.add_heading("What is not comparable")
    for engine in ENGINES.values():
        page.add_text(f"{engine.name}: {engine.differs}.")
    page.add_text("CPU and memory include the start of each engine; slow engines get fewer events.")
    if missing:
        page.add_heading("Left out")
        for name, why in missing.items():
            page.add_text(f"{name}: {why}")
    page.add_heading("All figures")
    page.add_figures(figures)
    page.write(Path("reports/bench-peers.html"))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run that is ended ends its engine
    sys.exit(main())
