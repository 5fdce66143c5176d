"""The observations of a query: its outputs and batches, gaps of its partitions, and missing rows. No I/O."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple


class Row(NamedTuple):
    """An output row: its key, its number among the rows of that key, and where it was computed."""

    key: int
    number: int
    partition: int
    host: str


class Output(NamedTuple):
    """A batch's output: when the query's function had it, and its rows."""

    at_s: float
    batch: int
    rows: list[Row]

    @property
    def partitions(self) -> set[int]:
        """The partitions with rows."""
        return {row.partition for row in self.rows}


@dataclass(slots=True)
class Observed:
    """The observations of one query so far; times are those of the machine's monotonic clock."""

    outputs: list[Output] = field(default_factory=list)
    progress: list[Mapping[str, Any]] = field(default_factory=list)
    """The batches' figures, with `at_s`."""
    batches: list[tuple[float, float]] = field(default_factory=list)
    """When a batch was known to have ended, and its duration in ms."""

    def take(self, line: str) -> None:
        """Take a line that the driver wrote."""
        found = json.loads(line)
        kind, at_s = found.pop("kind"), found["at_s"]
        if kind == "output":
            self.outputs.append(Output(at_s, found["batch"], [Row(*row) for row in found["rows"]]))
        elif kind == "progress":
            self.progress.append(found)
        else:
            self.batches.append((at_s, found["ms"]))

    def host_of(self, before_s: float) -> dict[int, str]:
        """Return the host on which each partition ran last before a moment."""
        return {row.partition: row.host for output in self.outputs if output.at_s <= before_s for row in output.rows}

    def gap_s(self, partitions: Collection[int], trigger_s: float, since_s: float, until_s: float) -> float | None:
        """
        Return the longest time between two outputs of one of the partitions, less the trigger.

        Args:
            partitions: The partitions.
            trigger_s: The query's trigger.
            since_s: The pair begins with the last output before this moment, or later.
            until_s: The pair ends before.
        """
        gaps = []
        for partition in partitions:
            times = [output.at_s for output in self.outputs if partition in output.partitions]
            before = [at_s for at_s in times if at_s <= since_s][-1:]
            times = before + [at_s for at_s in times if since_s < at_s <= until_s]
            gaps += [after - earlier for earlier, after in pairwise(times)]
        return max(0.0, max(gaps) - trigger_s) if gaps else None

    def rows_per_bin(self, since_s: float, until_s: float, bin_s: float = 0.1) -> list[tuple[float, float]]:
        """Return the rows that came out within each bin, with the bin's begin relative to `since_s`."""
        counts: Counter[int] = Counter()
        for output in self.outputs:
            if since_s <= output.at_s < until_s:
                counts[int((output.at_s - since_s) / bin_s)] += len(output.rows)
        return [(at * bin_s, float(counts[at])) for at in range(int((until_s - since_s) / bin_s))]


def by_batch(outputs: Iterable[Output]) -> dict[int, list[Row]]:
    """Return each batch's rows; those of a batch that ran again count once, the last time."""
    return {output.batch: output.rows for output in outputs}


def wrong_rows(outputs: Iterable[Output], counts: dict[int, int]) -> int:
    """
    Return how many rows are not the next of their key.

    Args:
        outputs: The query's outputs.
        counts: The newest count of each key from earlier runs of the same job; is brought up to date.
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    for rows in by_batch(outputs).values():
        for row in rows:
            found[row.key].append(row.number)
    wrong = 0
    for key, numbers in found.items():
        first = counts.get(key, 0) + 1
        wrong += sum(
            number != wanted for number, wanted in zip(numbers, range(first, first + len(numbers)), strict=True)
        )
        counts[key] = first + len(numbers) - 1
    return wrong


def missing_rows(outputs: Iterable[Output], rows_per_batch: int) -> int:
    """Return how many rows of the batches from the first to the last have no output."""
    batches = by_batch(outputs)
    came = rows_per_batch * (max(batches) - min(batches) + 1) if batches else 0
    return came - sum(map(len, batches.values()))
