"""B13: the rule by which jobs share slots: whatever some jobs do, something is left for the next one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dstl_service.process.shares import Shares, shares_of

TOTALS = st.integers(1, 200)
STEPS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([-200, -1, 1, 2, 200])), max_size=60)


def alone_max(shares: Shares) -> int:
    """Return the most that one job can hold if it takes one slot at a time and is alone; at least 1."""
    return max(1, min(shares.weight * shares.total // (shares.weight + 1), shares.total - shares.kept))


def after(shares: Shares, steps: list[tuple[int, int]]) -> Counter[int]:
    """Return what jobs hold after steps in which a job takes a number of slots, as far as allowed, or returns them."""
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
    """While the number of jobs with slots is at most a quarter of all slots, a job without one gets one."""
    shares = shares_of(total, weight)
    held = after(shares, steps)
    if len(held) <= max(shares.kept, min(1, total - 1)):
        assert shares.admits(0, 1, total - held.total())


@given(TOTALS, st.integers(1, 3), STEPS)
def test_no_more_is_held_than_there_is(total: int, weight: int, steps: list[tuple[int, int]]) -> None:
    """I9: each slot is given out once, and no job holds more than it would if it were alone."""
    shares = shares_of(total, weight)
    held = after(shares, steps)
    assert held.total() <= total
    assert max(held.values(), default=0) <= alone_max(shares)


@given(TOTALS, st.integers(1, 3), STEPS)
def test_nobody_is_refused_for_ever(total: int, weight: int, steps: list[tuple[int, int]]) -> None:
    """A job that holds nothing gets any free slot; a job that holds its share gets a slot after it returns one."""
    shares = shares_of(total, weight)
    free = total - after(shares, steps).total()
    assert shares.admits(0, free, free)
    assert not shares.admits(0, free + 1, free)


@given(st.integers(1, 1 << 40), st.integers(1, 3), st.lists(st.floats(0, 1), max_size=8))
def test_each_job_leaves_its_part_of_what_is_left(total: int, weight: int, parts: list[float]) -> None:
    """Bytes can be divided into arbitrarily small shares: every job that takes all it can leaves some."""
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
    """Each job takes half of what is left, down to the reserved quarter; of few slots every job gets one."""
    shares = shares_of(total)
    found: list[int] = []
    for _ in held:
        own = 0
        while shares.admits(own, 1, total - sum(found) - own):
            own += 1
        found.append(own)
    assert found == held
    assert alone_max(shares) == held[0]
