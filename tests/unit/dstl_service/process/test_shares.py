"""B13: the rule by which jobs share: whatever some of them do, something is left for the next one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dstl_service.process.shares import Shares, shares_of

TOTALS = st.integers(1, 200)
STEPS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([-200, -1, 1, 2, 200])), max_size=60)


def alone_max(shares: Shares) -> int:
    """Return the most that a job can hold that takes one place at a time and is alone; at least 1."""
    return max(1, min(shares.weight * shares.total // (shares.weight + 1), shares.total - shares.kept))


def after(shares: Shares, steps: list[tuple[int, int]]) -> Counter[int]:
    """Return what jobs hold after steps, in which a job takes so many places, as far as it may, or gives them back."""
    held: Counter[int] = Counter()
    for job, count in steps:
        for _ in range(count):
            if not shares.admits(held[job], 1, shares.total - held.total()):
                break
            held[job] += 1
        held[job] -= min(held[job], max(0, -count))
    return +held


@given(TOTALS, st.integers(1, 3), STEPS)
@example(40, 1, [(job, 200) for job in range(10)])
@example(40, 3, [(job, 200) for job in range(10)])
def test_newcomer_finds_a_place_at_once(total: int, weight: int, steps: list[tuple[int, int]]) -> None:
    """While no more jobs hold places than a quarter of all are, one that holds none gets one, whatever they did."""
    shares = shares_of(total, weight)
    held = after(shares, steps)
    if len(held) <= max(shares.kept, min(1, total - 1)):
        assert shares.admits(0, 1, total - held.total())


@given(TOTALS, st.integers(1, 3), STEPS)
def test_no_more_is_held_than_there_is(total: int, weight: int, steps: list[tuple[int, int]]) -> None:
    """I9: places are given out once, and no job holds more than it would if it had all to itself."""
    shares = shares_of(total, weight)
    held = after(shares, steps)
    assert held.total() <= total
    assert max(held.values(), default=0) <= alone_max(shares)


@given(TOTALS, st.integers(1, 3), STEPS)
def test_nobody_is_refused_for_ever(total: int, weight: int, steps: list[tuple[int, int]]) -> None:
    """A job that holds nothing gets whatever is free, and one that holds its share gets a place when it gives it up."""
    shares = shares_of(total, weight)
    free = total - after(shares, steps).total()
    assert shares.admits(0, free, free)
    assert not shares.admits(0, free + 1, free)


@given(st.integers(1, 1 << 40), st.integers(1, 3), st.lists(st.floats(0, 1), max_size=8))
def test_each_job_leaves_its_part_of_what_is_left(total: int, weight: int, parts: list[float]) -> None:
    """Of bytes, of which a share can be as small as need be, every job that takes all it can leaves some."""
    shares, free = Shares(total, weight, 0), total
    for part in parts:
        taken = int(weight * free / (weight + 1) * part)
        if taken > 1 and shares.admits(1, taken - 1, free):
            free -= taken
            assert free * (weight + 1) ** len(parts) >= total // (weight + 1)


@pytest.mark.parametrize(
    ("total", "held"),
    [
        (1, [1, 0, 0]),
        (2, [1, 1, 0]),
        (3, [1, 1, 1, 0]),
        (4, [2, 1, 1, 0]),
        (5, [2, 1, 1, 1, 0]),
        (10, [5, 2, 1, 1, 1, 0]),
        (24, [12, 6, 1, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_jobs_that_take_all_they_can(total: int, held: list[int]) -> None:
    """Each takes half of what is left, down to the quarter that is kept; of few places everybody gets one."""
    shares = shares_of(total)
    found: list[int] = []
    for _ in held:
        own = 0
        while shares.admits(own, 1, total - sum(found) - own):
            own += 1
        found.append(own)
    assert found == held
    assert alone_max(shares) == held[0]
