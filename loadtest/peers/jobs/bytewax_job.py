"""
Bytewax: a count and a sum per key, one row per event; state is kept in memory and written to SQLite every second.

Started by ``python -m bytewax.run bytewax_job:flow``, once for each of the two processes of its cluster.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from progress import Progress, key_of

FOLDER = Path(os.environ["PEER_FOLDER"])
EVENTS, KEYS = int(os.environ["PEER_EVENTS"]), int(os.environ["PEER_KEYS"])
_PARTS, _AT_ONCE = 2, 1_000


class _Part(StatefulSourcePartition[Any, int]):
    """Every second event."""

    def __init__(self, first: int) -> None:
        self._next = first

    def next_batch(self) -> list[tuple[str, float]]:
        if self._next >= EVENTS:
            raise StopIteration
        numbers = range(self._next, min(EVENTS, self._next + _PARTS * _AT_ONCE), _PARTS)
        self._next = numbers[-1] + _PARTS
        return [(str(key_of(number, KEYS)), float(number)) for number in numbers]

    def snapshot(self) -> int:
        return self._next


class Events(FixedPartitionedSource[Any, int]):
    """All events, in two parts that can be read again from any place."""

    def list_parts(self) -> list[str]:
        return [str(number) for number in range(_PARTS)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Part:
        return _Part(int(for_part) if resume_state is None else resume_state)


class _RowsPart(StatelessSinkPartition[Any]):
    def __init__(self, path: Path) -> None:
        self._progress = Progress(FOLDER)
        self._file = path.open("a", encoding="ascii")

    def write_batch(self, items: list[Any]) -> None:
        self._file.writelines(f"{key},{row[0]}\n" for key, row in items)
        self._file.flush()
        self._progress.add(len(items))

    def close(self) -> None:
        self._file.close()
        self._progress.end()


class Rows(DynamicSink[Any]):
    """A file of each worker, to which a later run appends."""

    def build(self, step_id: str, worker_index: int, worker_count: int) -> _RowsPart:
        (FOLDER / "out").mkdir(parents=True, exist_ok=True)
        return _RowsPart(FOLDER / "out" / f"{worker_index}.csv")


def total(state: tuple[int, float] | None, value: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """Return the state with an event, as new state and as row."""
    count, amount = state or (0, 0.0)
    new = (count + 1, amount + value)
    return new, new


flow = Dataflow("totals")
op.output("rows", op.stateful_map("totals", op.input("events", flow, Events()), total), Rows())
