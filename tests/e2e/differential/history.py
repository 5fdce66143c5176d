"""
The input of differential tests: histories of a query, drawn by Hypothesis.

A history is a sequence of runs of one query, each with a parallelism and batches of rows; between two runs, a host's
tables and Spark's last commit may be lost. Rows are the same for all plans; each processor defines what their
operations mean. Keys are independent, so one history holds as many independent ones as keys.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hypothesis import strategies as st

SCHEMA = "k string, op int, name string, n int, t timestamp, i int"
START_S = 1_700_000_000
BATCH_S = 10
"""Delay of a batch's rows relative to those of the previous batch."""

DELAY_S = 7
KEYS = ("a", "b", "c", "d", "e", None)
CLOCK = "clock"
"""A key with a row in every batch, which moves the watermark."""

OPERATIONS = 7
_CLOSING_S = 10_000


@dataclass(frozen=True, slots=True)
class Event:
    """A row; its time is `offset_s` after the start of its batch."""

    k: str | None
    op: int
    name: str | None
    n: int
    offset_s: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the query from start to stop, and what this backend loses before it."""

    batches: tuple[tuple[Event, ...], ...]
    parallelism: int
    tables_lost: bool = False
    commit_lost: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """Runs of one query."""

    runs: tuple[Run, ...]

    def files(self, closing: int) -> list[list[str]]:
        """Return the files of each run, one per batch; the last ones move the watermark past all timers."""
        files, number = [], 0
        for run in self.runs:
            contents = []
            for batch in run.batches:
                contents.append(_content([*batch, Event(CLOCK, 0, None, 0, 0)], number * BATCH_S))
                number += 1
            files.append(contents)
        files[-1] += [_content([Event(CLOCK, OPERATIONS - 1, None, 0, 0)], _CLOSING_S)] * closing
        return files

    @property
    def rows(self) -> int:
        """The number of generated rows."""
        return sum(len(batch) for run in self.runs for batch in run.batches)


def _content(events: list[Event], second: int) -> str:
    rows = [
        {
            "k": event.k,
            "op": event.op,
            "name": event.name,
            "n": event.n,
            "t": datetime.fromtimestamp(START_S + second + event.offset_s, UTC).isoformat(),
            "i": position,
        }
        for position, event in enumerate(events)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


class Feed:
    """A folder that files are added to one by one, in an order that Spark's file source keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        folder.mkdir()

    def put(self, content: str) -> int:
        """Add a file atomically; return its number."""
        hidden, path = self.folder / f".{self._number}", self.folder / f"{self._number:05d}.json"
        hidden.write_text(content, encoding="utf-8")
        os.utime(hidden, (START_S + self._number, START_S + self._number))
        hidden.rename(path)
        self._number += 1
        return self._number - 1


_NAMES = ("a", "b", "c", None)
_NUMBERS = 5
_OFFSETS_S = (0, 2, 5, 9, -4, -60)
_EVENTS = st.builds(
    Event,
    k=st.sampled_from(KEYS),
    op=st.integers(0, OPERATIONS - 1),
    name=st.sampled_from(_NAMES),
    n=st.integers(0, _NUMBERS - 1),
    offset_s=st.sampled_from(_OFFSETS_S),
)
_BATCHES = st.lists(_EVENTS, max_size=16).map(tuple)


def histories(runs: tuple[int, int], batches_max: int = 2) -> st.SearchStrategy[History]:
    """Return histories with a number of runs between these bounds, of up to `batches_max` batches each."""
    batches = st.lists(_BATCHES, min_size=1, max_size=batches_max).map(tuple)
    parallelism = st.integers(1, 3)
    first = st.builds(Run, batches=batches, parallelism=parallelism)
    later = st.builds(
        Run, batches=batches, parallelism=parallelism, tables_lost=st.booleans(), commit_lost=st.booleans()
    )
    least, greatest = runs
    others = st.lists(later, min_size=least - 1, max_size=greatest - 1)
    return st.builds(lambda run, rest: History((run, *rest)), first, others)


def rich_history(runs: int) -> History:
    """
    Return a history that contains everything: many rows, another parallelism, lost and kept tables and commits.

    Its first run is long enough for snapshots to be requested, stored and included in the state.
    """
    chance = random.Random(runs)

    def files(number: int) -> int:
        return 1 if number else 4

    def event() -> Event:
        key, name, offset_s = chance.choice(KEYS), chance.choice(_NAMES), chance.choice(_OFFSETS_S)
        return Event(key, chance.randrange(OPERATIONS), name, chance.randrange(_NUMBERS), offset_s)

    return History(
        tuple(
            Run(
                tuple(tuple(event() for _ in range(24)) for _ in range(files(number))),
                1 + number % 3,
                tables_lost=number % 2 == 1,
                commit_lost=number % 2 == 1,
            )
            for number in range(runs)
        )
    )
