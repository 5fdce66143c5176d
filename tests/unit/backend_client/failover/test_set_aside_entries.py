"""Which rows wait, for whom, and as of when they run."""

from __future__ import annotations

import pytest

from backend_client.batch_time import BatchTime
from backend_client.failover.set_aside_entries import (
    after_batch,
    by_owner,
    by_partition,
    closing_time,
    companion_info,
    time_of,
    to_run,
)
from dstl_service.wire import OperatorInfo, RowsSetAside
from storage.errors import InternalError
from storage.key_groups import KeyGroupRange, key_group_range

LEFT, RIGHT, ALL = KeyGroupRange(0, 9), KeyGroupRange(10, 19), KeyGroupRange(0, 19)


def entry(checkpoint_id: int, key_groups: KeyGroupRange = LEFT, *, is_lost: bool = False) -> RowsSetAside:
    """Return an entry of five rows."""
    return RowsSetAside(checkpoint_id, key_groups.first, key_groups.last, 5, 50, is_lost=is_lost)


def test_partition_runs_its_own_in_order() -> None:
    """A partition runs the rows that are not lost and share key groups with it, by batch, then by key group."""
    waiting = (entry(8, RIGHT), entry(7), entry(8), entry(6, is_lost=True), entry(9, KeyGroupRange(20, 29)))

    assert to_run(waiting, LEFT) == (entry(7), entry(8))
    assert to_run(waiting, ALL) == (entry(7), entry(8), entry(8, RIGHT))
    assert [*by_partition(to_run(waiting, ALL))] == [(entry(7),), (entry(8),), (entry(8, RIGHT),)]
    both = (entry(8), entry(8, is_lost=True))
    assert [*by_partition(to_run((*both, entry(8, RIGHT)), ALL, with_lost=True))] == [both, (entry(8, RIGHT),)]
    assert to_run(waiting, KeyGroupRange(9, 10)) == to_run(waiting, ALL)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 30])
def test_partitions_are_found_by_key_groups(parallelism: int) -> None:
    """Each partition gets the entries that share key groups with it, whatever the parallelism that they are of."""
    waiting = (entry(8, RIGHT), entry(7), entry(8), entry(9, KeyGroupRange(25, 29)))
    found = by_owner(waiting, parallelism, 30)

    for partition in range(parallelism):
        own = key_group_range(partition, parallelism, 30)
        assert to_run(found.get(partition, ()), own) == to_run(waiting, own)
        assert len(found.get(partition, ())) == len(to_run(waiting, own))


def test_only_stalled_partitions_keep_what_waits() -> None:
    """Waiting entries stay for stalled partitions, and lost rows stay for ever; new entries come last."""
    waiting = (entry(7), entry(7, RIGHT), entry(7, RIGHT, is_lost=True))

    assert after_batch(waiting, [LEFT], [entry(9)]) == (entry(7), entry(7, RIGHT, is_lost=True), entry(9))
    assert after_batch(waiting, [], []) == (entry(7, RIGHT, is_lost=True),)


def test_rows_never_run_in_part() -> None:
    """A stalled partition that would have to keep a part of other partitions' rows is an error, not a loss."""
    with pytest.raises(InternalError, match="00000-00009 have run in part"):
        after_batch((entry(7),), [KeyGroupRange(5, 14)], [])


def test_rows_run_as_of_their_arrival() -> None:
    """An entry has its batch's time; it closes at the watermark that the batch led to, if that moved."""
    timed = RowsSetAside(7, 0, 9, 0, 0, 500, 40, 30, closed_ms=60)

    assert time_of(timed) == BatchTime(500, 40, 30)
    assert closing_time(timed) == BatchTime(500, 60, 40)
    assert time_of(entry(7)) is None
    for closed_ms in (None, 40):
        assert closing_time(RowsSetAside(7, 0, 9, 0, 0, 500, 40, 30, closed_ms=closed_ms)) is None


def test_companion_is_no_table() -> None:
    """The companion tells where the rows are and what they are; it is no operator with state."""
    info = companion_info(OperatorInfo("op", 4, "{}", {}, kind="rows"), "struct<k:string>", (entry(7),))

    assert (info.name, info.parallelism, info.key_schema, info.set_aside) == (
        "op.set-aside",
        4,
        "struct<k:string>",
        [entry(7)],
    )
    assert not info.has_table
