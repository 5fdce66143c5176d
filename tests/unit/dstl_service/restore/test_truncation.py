"""Which materializations and segments of a state count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstl_service.formats.manifest import StateView
from dstl_service.restore.truncation import (
    Counting,
    bases_of,
    key_groups_by_materialization,
    truncate,
    without_consumed,
)
from dstl_service.wire import CLOSED_SINK, REMOVED, SET_ASIDE, SINK, OperatorInfo, RowsSetAside
from storage.key_groups import KeyGroupRange
from storage.model import MaterializationHandle, SegmentHandle, SegmentKind
from tests.unit.dstl_service.samples import handles_of, segment


def snapshot(first: int, last: int, checkpoint_id: int, uid: str = "", operator: str = "op") -> MaterializationHandle:
    """Return a materialization."""
    uid = uid or f"{first}-{last}-{checkpoint_id}"
    return MaterializationHandle(operator, KeyGroupRange(first, last), checkpoint_id, uid, f"{uid}.json", 1)


def log(*checkpoints: int, operator: str = "op") -> list[SegmentHandle]:
    """Return segments of the key groups 0-9 and 10-19, one each per checkpoint."""
    return [
        handles_of([segment(checkpoint_id=checkpoint_id, partition=partition, operator=operator)])[0]
        for checkpoint_id in checkpoints
        for partition in (0, 1)
    ]


def left(view: StateView) -> list[tuple[int, int]]:
    """Return checkpoint and partition of the segments that are left of a log."""
    return [(handle.entry.id.checkpoint_id, handle.entry.id.partition) for handle in view.log]


def test_log_is_cut_after_snapshot() -> None:
    """The log of the materialized key groups is truncated up to the snapshot's checkpoint, and no further."""
    view = truncate(StateView((), log(1, 2, 3)), [snapshot(0, 9, 2)])

    assert left(view) == [(1, 1), (2, 1), (3, 0), (3, 1)]


def test_partly_covered_segment_stays() -> None:
    """A segment is kept while one of its key groups is not materialized, and dropped with the last of them."""
    view = truncate(StateView((), log(1)), [snapshot(0, 4, 1)])
    assert left(view) == [(1, 0), (1, 1)]

    assert left(truncate(view, [snapshot(5, 12, 1)])) == [(1, 1)]


def test_older_snapshots_go_with_their_last_key_group() -> None:
    """A materialization is dropped when newer ones together hold all its key groups."""
    old, first, second = snapshot(0, 9, 1), snapshot(0, 4, 2), snapshot(5, 12, 3)
    view = truncate(StateView((old,), []), [first])
    assert view.materializations == (first, old)

    assert truncate(view, [second]).materializations == (first, second)


def test_older_snapshot_does_not_enter() -> None:
    """A late materialization that is older than the state's own changes nothing."""
    view = StateView((snapshot(0, 9, 5),), log(6))

    assert truncate(view, [snapshot(0, 9, 4), snapshot(2, 3, 5, "z")]) == view
    assert not Counting(view).would_count(snapshot(0, 9, 4))
    assert Counting(view).would_count(snapshot(0, 9, 6))
    assert Counting(view).would_count(snapshot(0, 10, 4))


def test_other_operator_is_left_alone() -> None:
    """An operator's snapshot does not affect another operator's log and snapshots."""
    other = snapshot(0, 9, 1, operator="other")
    view = truncate(StateView((other,), [*log(1), *log(1, operator="other")]), [snapshot(0, 19, 2)])

    assert other in view.materializations
    assert {handle.entry.id.operator for handle in view.log} == {"other"}


def test_repetition_changes_nothing() -> None:
    """Adding again what a state already has changes nothing: the result is the same object."""
    view = truncate(StateView((), log(1, 2)), [snapshot(0, 9, 1)])

    assert truncate(view, []) is view
    assert truncate(view, list(view.materializations)) == view


def test_newest_counts_for_each_key_group() -> None:
    """For a wider table, each key group comes from the newest snapshot that holds it."""
    old, new = snapshot(0, 19, 1), snapshot(5, 9, 2)

    assert key_groups_by_materialization([old, new], [], KeyGroupRange(3, 12)) == [
        (new, (KeyGroupRange(5, 9),)),
        (old, (KeyGroupRange(3, 4), KeyGroupRange(10, 12))),
    ]
    assert key_groups_by_materialization([old, new], [], KeyGroupRange(6, 7)) == [(new, (KeyGroupRange(6, 7),))]


@pytest.mark.parametrize("kind", [SINK, CLOSED_SINK])
def test_published_output_goes(kind: str) -> None:
    """Output up to the checkpoint that the sink tells is dropped; other operators and later output stay."""
    view = StateView((), [*log(1, 2, 3), *log(1, 2, 3, operator="output")])
    sink = OperatorInfo("output", 2, "", {}, kind=kind, published=2)

    left_over = without_consumed(view, [OperatorInfo("op", 2, "", {}, kind="rows"), sink])

    assert [handle for handle in left_over.log if handle.entry.id.operator == "op"] == log(1, 2, 3)
    assert [handle for handle in left_over.log if handle.entry.id.operator == "output"] == log(3, operator="output")
    assert without_consumed(view, [replace(sink, published=None)]) is view
    assert without_consumed(view, [replace(sink, kind="rows")]) is view
    assert without_consumed(view, []) is view


def test_rows_set_aside_stay_until_they_have_run() -> None:
    """The rows of a batch and partition stay while they are listed, whatever other rows have run meanwhile."""
    view = StateView((), [*log(1, 2, 3), *log(1, 2, 3, operator="op.rows")])
    waiting = [RowsSetAside(1, 10, 19, 5, 100), RowsSetAside(3, 0, 9, 5, 100, is_lost=True)]
    beside = OperatorInfo("op.rows", 2, "", {}, kind=SET_ASIDE, set_aside=waiting)

    left_over = without_consumed(view, [OperatorInfo("op", 2, "", {}, kind="rows"), beside])

    assert [handle for handle in left_over.log if handle.entry.id.operator == "op"] == log(1, 2, 3)
    of_rows = [handle for handle in left_over.log if handle.entry.id.operator == "op.rows"]
    assert left(StateView((), of_rows)) == [(1, 1), (3, 0)]


def test_nothing_of_a_removed_operator_counts() -> None:
    """I12: its log and its materializations leave the state, so that they are collected; others' stay."""
    view = StateView((snapshot(0, 9, 1, operator="gone"), snapshot(0, 9, 1)), [*log(2), *log(2, operator="gone")])
    operators = [OperatorInfo("op", 2, "", {}, kind="rows"), OperatorInfo("gone", 2, "", {}, kind=REMOVED)]

    left_over = without_consumed(view, operators)

    assert [handle.operator for handle in left_over.materializations] == ["op"]
    assert left_over.log == log(2)
    assert without_consumed(left_over, operators) is left_over


def test_time_grows_with_the_number_of_tables_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand tables kept each checkpoint for six seconds: a table is compared with few others."""
    tables, compared = 500, 0

    def counted(one: KeyGroupRange, other: KeyGroupRange) -> bool:
        nonlocal compared
        compared += 1
        return one.first <= other.last and other.first <= one.last

    monkeypatch.setattr(KeyGroupRange, "intersects", counted)
    ranges = [KeyGroupRange(10 * number, 10 * number + 9) for number in range(tables)]
    snapshots = [snapshot(one.first, one.last, 3) for one in ranges[::2]]
    based = handles_of(
        [replace(segment(partition=number), kind=SegmentKind.BASE) for number in range(1, tables, 2)]
        + [segment(checkpoint_id=4, partition=number) for number in range(tables)]
    )
    view = truncate(StateView(tuple(snapshots), based), [snapshot(10, 19, 4)])
    counted_there = key_groups_by_materialization(view.materializations, bases_of(view.log, "op"), ranges[2])

    assert len(view.materializations) == tables // 2 + 1
    assert [handle.key_groups for handle, _ in counted_there] == [ranges[2]]
    assert compared < 20 * tables
