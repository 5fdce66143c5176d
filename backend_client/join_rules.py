"""
Which rows of several inputs belong together: the rules of `stream_join` for the rows of one key.

A row lives from its event time until its input's wait is over, both moments included. Rows that live at one moment
meet. A combination takes at most one row of each input, and all of them meet; it is *complete* with a row of every
input, and *maximal* if no row of an input that it leaves out meets all of its rows. An inner join puts out the complete
ones, a full join the maximal ones, a left join the maximal ones with a row of the first input. Of two inputs these are
the joins of SQL on ``right.time between left.time - right.wait and left.time + left.wait``; of more, the full join is
what the literature calls the full disjunction.

1. What is put out depends on the rows alone, not on the order in which they come.
2. A complete combination is known when its last row comes (`complete`), any other when its first row's life ends
   (`end_lives`): who comes later than the watermark meets no row that has ended before it.
3. A row that has ended is needed no more. That one of its input was there is remembered as one moment, the last end.

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
    """A row that waits; `number` tells rows of the same moment apart."""

    begin: int
    number: int
    row: Any


Combination = tuple[Life | None, ...]

_begin = attrgetter("begin")


@dataclass(slots=True)
class Side:
    """The living rows of one input, by their begin; they live equally long, so also by their end."""

    wait: int
    lives: list[Life] = field(default_factory=list)

    @classmethod
    def of(cls, wait: int, lives: Iterable[Life]) -> Side:
        """Return a side of rows in any order."""
        return cls(wait, sorted(lives, key=_begin))

    def add(self, life: Life) -> None:
        """Let another row live."""
        insort(self.lives, life, key=_begin)

    def living(self, begin: int, end: int) -> list[Life]:
        """Return the rows that live at some moment of a time."""
        first = bisect_left(self.lives, begin - self.wait, key=_begin)
        return self.lives[first : bisect_right(self.lives, end, key=_begin)]

    def ended(self, until: int) -> list[Life]:
        """Return the rows whose life ends at a moment or before it."""
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
    End the lives that are over and yield the combinations that are thereby known to be maximal, incomplete ones only.

    Args:
        sides: The living rows; those that end up to `until` are taken out, also of `sides`.
        until: Lives that end at this moment or before it are over.
        last_ends: For each input when its last life ended that is over; brought up to date.
        required: Inputs of which a combination must have a row to be yielded.
    """
    while True:
        ends = [(side.lives[0].begin + side.wait, at) for at, side in enumerate(sides) if side.lives]
        end, position = min(ends, default=(until + 1, 0))
        if end > until:
            return
        ended = sides[position].lives.pop(0)
        # All that have begun and not ended by now live at this moment, so any of them meet.
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
        last_ends[position] = end if last is None else max(last, end)  # a wait that was made shorter ends rows earlier


def _has_begun(side: Side, moment: int) -> bool:
    return bool(side.lives) and side.lives[0].begin <= moment
