"""The rules of joins, one by one; the property tests show that they add up to the definition."""

from __future__ import annotations

from backend_client.join_rules import Life, Side, complete, end_lives

A, B, C = (Life(begin, 0, name) for begin, name in ((0, "a"), (10, "b"), (20, "c")))


def sides(*waits_and_lives: tuple[int, list[Life]]) -> list[Side]:
    return [Side.of(wait, lives) for wait, lives in waits_and_lives]


def test_rows_meet_at_both_ends_of_their_lives() -> None:
    """A row's lifetime includes its first and its last moment, and nothing beyond."""
    early, late = Life(-10, 1, "early"), Life(30, 2, "late")
    waiting = Side.of(20, [late, B, early, Life(-11, 3, "too early"), Life(31, 4, "too late")])

    assert [life.row for _, life in complete([None, waiting], B, 20)] == ["early", "b", "late"]


def test_complete_combination_has_one_moment_for_all() -> None:
    """Rows that overlap with the new one, but not with each other, do not form a combination with it."""
    assert list(complete([Side.of(10, [A]), None, Side.of(10, [C])], B, 10)) == []
    assert list(complete([Side.of(20, [A]), None, Side.of(10, [C])], B, 10)) == [(A, B, C)]


def test_end_of_life_makes_combinations_known() -> None:
    """A row's end emits its combinations, with nulls only for inputs without an overlapping row."""
    ends: list[int | None] = [None] * 3
    three = sides((10, [A]), (10, [B]), (10, [C]))

    assert list(end_lives(three, 9, ends, set())) == []
    assert list(end_lives(three, 10, ends, set())) == [(A, B, None)]
    assert list(end_lives(three, 20, ends, set())) == [(None, B, C)]
    assert list(end_lives(three, 99, ends, set())) == []
    assert ends == [10, 20, 30]


def test_required_input_is_in_every_combination() -> None:
    """Combinations without a row of a required input are not emitted, and their rows still end."""
    two = sides((5, [A]), (5, [B]))

    assert list(end_lives(two, 99, [None, None], {0})) == [(A, None)]
    assert not any(side.lives for side in two)


def test_last_end_never_goes_back() -> None:
    """After a wait was shortened, rows that end before an already ended one change nothing."""
    ends: list[int | None] = [40, None]

    assert list(end_lives(sides((5, [A]), (5, [])), 99, ends, {1})) == []
    assert ends == [40, None]
