"""The next step of a follower."""

from __future__ import annotations

import pytest

from backend_client.standby.orders import TableName, id_of
from backend_client.standby.upkeep import Copy, Disk, has_room, in_turn, is_behind, rest_s, status_of, to_give_up
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.key_groups import KeyGroupRange

TABLES = [TableName("op", KeyGroupRange(at, at)) for at in range(5)]
DISK = Disk(total_bytes=1000, free_bytes=500)


def test_oldest_copy_comes_first_and_new_ones_last() -> None:
    """Complete copies are brought forward, the oldest first, before missing ones are made."""
    copies = {TABLES[0]: Copy(9, 1), TABLES[3]: Copy(4, 1)}

    assert in_turn(TABLES, copies) == [TABLES[3], TABLES[0], TABLES[1], TABLES[2], TABLES[4]]


@pytest.mark.parametrize(
    ("size_bytes", "bytes_max", "fits"), [(200, 0, True), (201, 0, False), (40, 100, True), (41, 100, False)]
)
def test_copy_needs_room(size_bytes: int, bytes_max: int, fits: bool) -> None:
    """A copy takes twice its size while it is made and leaves a tenth of the disk free; the limit counts all copies."""
    assert has_room(size_bytes, [Copy(1, 60)], DISK, bytes_max) is fits


def test_largest_copy_is_given_up_when_room_runs_out() -> None:
    """Copies that have grown beyond the limit, or that fill the disk, are given up; others stay."""
    copies = {TABLES[0]: Copy(1, 40), TABLES[1]: Copy(1, 70)}

    assert to_give_up(copies, DISK, 0) is None
    assert to_give_up(copies, DISK, 110) is None
    assert to_give_up(copies, DISK, 109) == TABLES[1]
    assert to_give_up(copies, Disk(1000, 49), 0) == TABLES[1]
    assert to_give_up({}, Disk(1000, 0), 1) is None


@pytest.mark.parametrize(
    ("version", "behind"),
    [
        (CheckpointRef(6, 0, "u"), True),
        (CheckpointRef(7, 0, "u"), False),
        (CheckpointRef(8, 0, "u"), False),
    ],
)
def test_table_that_a_task_has_used_is_not_taken_back(version: CheckpointRef, behind: bool) -> None:
    """A table at the checkpoint or beyond it is left alone: to go back it would be made again from the storage."""
    assert is_behind(version, CheckpointRef(7, 0, "v")) is behind


def test_table_of_a_branch_that_was_rewound_is_made_anew() -> None:
    """After a rewind, a higher checkpoint of the old branch is not beyond the new one."""
    rewound = CheckpointRef(7, 2 * BRANCH_GENERATIONS, "v")
    assert is_behind(CheckpointRef(9, 0, "u"), rewound)
    assert not is_behind(rewound, CheckpointRef(9, 0, "u")), "an order from before the rewind takes nothing back"


def test_follower_rests_most_of_the_time() -> None:
    """After steps of 2 s it rests for 8 s, and for a second at least."""
    assert rest_s(2.0) == pytest.approx(8.0)
    assert rest_s(0.01) == 1.0


def test_status_counts_the_tables_of_the_order() -> None:
    """Copies of tables that are no longer ordered do not count, and missing ones do."""
    copies = {TABLES[0]: Copy(9, 10), TABLES[1]: Copy(4, 20), TABLES[4]: Copy(1, 30)}

    status = status_of(TABLES[:3], copies, read_bytes=5)

    assert (status.tables, status.missing, status.oldest_id, status.size_bytes) == (2, 1, 4, 30)
    assert (status.read_bytes, status.tables_id) == (5, id_of(TABLES[:3]))
    assert status_of([], {}, 0).oldest_id == -1
