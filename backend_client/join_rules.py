"""
The matching rules of `stream_join` for the rows of one key.

A row lives from its event time until its input's wait is over, both moments included. Rows that live at one moment
*meet*. A combination has at most one row of each input, and all its rows meet. It is *complete* with a row of every
input, and *maximal* if no row of a missing input meets all of its rows. An inner join emits the complete ones, a full
join the maximal ones, a left join the maximal ones with a row of the first input. For two inputs these are SQL's
joins on ``right.time between left.time - right.wait and left.time + left.wait``; for more inputs, the full join is the
*full disjunction* of the literature.

1. The output depends only on the rows, not on their order of arrival.
2. A complete combination is known when its last row arrives (`complete`), any other when its first row's life ends
   (`end_lives`): a row that arrives after the watermark meets no row that ended before it.
3. An ended row is no longer needed. One moment per input, the last end, records that there was one.

No I/O. Times are whole numbers of one unit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple


class Life(NamedTuple):
    """A waiting row; `number` distinguishes rows of the same moment."""

    begin: int
    number: int
    row: Any


Combination = tuple[Life | None, ...]

_begin = attrgetter("begin")


@dataclass(slots=True)
class Side:
    """The living rows of one input, sorted by begin and, as all live equally long, by end."""

    wait: int
    lives: list[Life] = field(default_factory=list)

    @classmethod
    def of(cls, wait: int, lives: Iterable[Life]) -> Side:
        """Return a side from rows in any order."""
        return cls(wait, sorted(lives, key=_begin))

    def add(self, life: Life) -> None:
        """Add a living row."""
        insort(self.lives, life, key=_begin)

    def living(self, begin: int, end: int) -> list[Life]:
        """Return the rows that live at some moment from `begin` to `end`, both inclusive."""
        first = bisect_left(self.lives, begin - self.wait, key=_begin)
        return self.lives[first : bisect_right(self.lives, end, key=_begin)]

    def ended(self, until: int) -> list[Life]:
        """Return the rows whose life ends at or before a moment."""
        return self.lives[: bisect_right(self.lives, until - self.wait, key=_begin)]


def complete(sides: Sequence[Side | None], new: Life, wait: int) -> Iterator[tuple[Life, ...]]:
    """
    Yield the complete combinations of a new row.

    Args:
        sides: The living rows of each input, None for the new row's own.
        new: The row.
        wait: How long rows of its input wait.
    """
    return _complete(sides, new, new.begin, new.begin + wait)


def _complete(sides: Sequence[Side | None], new: Life, begin: int, end: int) -> Iterator[tuple[Life, ...]]:
    if not sides:
        yield ()
        return
    side, *rest = sides
    if side is None:
        yield from ((new, *others) for others in _complete(rest, new, begin, end))
        return
    for life in side.living(begin, end):
        both = max(begin, life.begin), min(end, life.begin + side.wait)
        yield from ((life, *others) for others in _complete(rest, new, *both))


def end_lives(
    sides: Sequence[Side], until: int, last_ends: list[int | None], required: AbstractSet[int]
) -> Iterator[Combination]:
    """
    End the lives that are over; yield the incomplete combinations that are thereby known to be maximal.

    Args:
        sides: The living rows; those that end up to `until` are removed from `sides`.
        until: Lives that end at or before this moment are over.
        last_ends: For each input the last end of an ended life, or None; updated.
        required: Inputs from which a yielded combination must have a row.
    """
    while True:
        ends = [(side.lives[0].begin + side.wait, at) for at, side in enumerate(sides) if side.lives]
        end, position = min(ends, default=(until + 1, 0))
        if end > until:
            return
        ended = sides[position].lives.pop(0)
        # All rows that have begun and not ended live at this moment, so they all meet.
        left_out = [at for at, side in enumerate(sides) if at != position and not _has_begun(side, end)]
        if left_out and not any(at in required for at in left_out):
            living = [
                [ended] if at == position else [None] if at in left_out else side.living(end, end)
                for at, side in enumerate(sides)
            ]
            for combination in product(*living):
                newest = max(life.begin for life in combination if life is not None)
                if all((met := last_ends[at]) is None or met < newest for at in left_out):
                    yield combination
        last = last_ends[position]
        last_ends[position] = end if last is None else max(last, end)  # a shortened wait ends rows earlier


def _has_begun(side: Side, moment: int) -> bool:
    return bool(side.lives) and side.lives[0].begin <= moment
