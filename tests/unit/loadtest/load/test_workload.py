"""The simulated tasks' work, and detection of wrong tables."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.load.workload import SimulatedTable, Workload, WrongDataError
from storage.key_groups import KeyGroupRange, key_group_range

TASKS = [(checkpoint_id, partition) for checkpoint_id in range(40) for partition in range(100)]


def table(first: int = 0, last: int = 3, **content: bytes) -> SimulatedTable:
    """Make a table with content given as g<key group>_<number>=value."""
    made = SimulatedTable(KeyGroupRange(first, last))
    made.apply({key(name): value for name, value in content.items()})
    return made


def key(name: str) -> bytes:
    group, number = name.removeprefix("g").split("_")
    return int(group).to_bytes(2, "big") + b"\0\1" + int(number).to_bytes(4, "big")


def test_plan_follows_from_seed() -> None:
    """The same seed, checkpoint and partition give the same plan, in any order; another seed gives another plan."""
    forth = [Workload(1, 128).plan(*task, 100) for task in TASKS[:50]]
    workload = Workload(1, 128)
    back = [workload.plan(*task, 100) for task in reversed(TASKS[:50])]

    assert forth == back[::-1]
    assert forth != [Workload(2, 128).plan(*task, 100) for task in TASKS[:50]]


def test_keys_lie_in_range_of_task() -> None:
    """Every set of a task changes at least one key, and only keys of its own key groups."""
    workload = Workload(0, 128)
    for checkpoint_id, partition in TASKS:
        plan = workload.plan(checkpoint_id, partition, 100)
        owned = key_group_range(partition, 100, 128)
        for planned in [*plan.sets, plan.loser or plan.sets[0]]:
            assert planned.changes
            assert all(owned.contains(int.from_bytes(key[:2], "big")) for key in planned.changes)


def test_every_kind_of_task_occurs() -> None:
    """Within 40 checkpoints, tasks send early, lose tables, are retried, repeat sets, rescale and delete keys."""
    plans = [Workload(0, 128).plan(*task, 100) for task in TASKS]

    assert any(len(plan.sets) == 2 for plan in plans)
    assert any(plan.loser is not None for plan in plans)
    assert any(plan.is_table_lost for plan in plans)
    assert any(plan.is_sent_twice for plan in plans)
    assert any(plan.rescaled is not None and plan.rescaled.last < 128 for plan in plans)
    assert any(None in plan.changes().values() for plan in plans)


def test_later_set_wins() -> None:
    """The table's value of each key is the last one over a task's sets."""
    plans = [plan for task in TASKS if len((plan := Workload(0, 128).plan(*task, 100)).sets) == 2]
    ahead, tail = plans[0].sets

    assert plans[0].changes() == ahead.changes | tail.changes


def test_table_takes_its_range_only() -> None:
    """Changes of other key groups are omitted; a deleted key is gone."""
    found = table(1, 2, g0_1=b"a", g1_1=b"b", g2_1=b"c", g3_1=b"d")
    found.apply({key("g2_1"): None, key("g2_9"): None})

    found.check(table(0, 3, g0_1=b"x", g1_1=b"b", g3_1=b"y"))


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({"g1_1": b"b"}, "1 keys are missing, 0 too many, 0 have"),
        ({"g1_1": b"b", "g2_1": b"c", "g2_2": b"?"}, "0 keys are missing, 1 too many, 0 have"),
        ({"g1_1": b"b", "g2_1": b"?"}, "0 keys are missing, 0 too many, 1 have"),
    ],
)
def test_wrong_table_is_found(found: Any, what: str) -> None:
    """I14: for a missing, extra or wrong key, the error says so."""
    with pytest.raises(WrongDataError, match=what):
        table(**found).check(table(g1_1=b"b", g2_1=b"c"))
