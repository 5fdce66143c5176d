"""The list of what is under way: how it changes from checkpoint to checkpoint, and what it implies for keys."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from dstl_service.formats.manifest import decode_manifest, encode_manifest
from dstl_service.formats.under_way import (
    CHECKPOINTS_MAX,
    Announcement,
    UnderWay,
    UnderWaySnapshot,
    followed,
    uid_in_key,
)
from dstl_service.wire import REMOVED, CheckpointRef, OperatorInfo
from storage.errors import InvalidInputError
from storage.key_groups import KeyGroupRange, key_group_range
from storage.model import MaterializationHandle
from tests.unit.dstl_service.samples import manifest

BASE = CheckpointRef(9, 0, "base")
OPERATORS = [OperatorInfo("op", 2, "{}", {})]
LEFT, RIGHT = KeyGroupRange(0, 63), KeyGroupRange(64, 127)


def snapshot(uid: str, version: int = 7, key_groups: KeyGroupRange = LEFT, operator: str = "op") -> UnderWaySnapshot:
    """Return a snapshot of a table."""
    return UnderWaySnapshot(operator, key_groups, CheckpointRef(version, 0, "v"), uid)


def uids_after(
    *before: UnderWaySnapshot,
    announced: tuple[Announcement, ...] = (),
    gone: tuple[str, ...] = (),
    materializations: tuple[MaterializationHandle, ...] = (),
    base: CheckpointRef = BASE,
    operators: list[OperatorInfo] = OPERATORS,
) -> list[str]:
    """Return the uids that the checkpoint after `base` lists."""
    listed = followed(UnderWay(before), base, announced, gone, operators, materializations, 128)
    return [item.uid for item in listed]


def test_list_is_carried_on() -> None:
    """An entry stays under way from checkpoint to checkpoint, until it is taken or refused."""
    assert uids_after(snapshot("a"), snapshot("b", 8, RIGHT)) == ["a", "b"]
    assert uids_after(snapshot("a"), snapshot("b", 8, RIGHT), gone=("a",)) == ["b"]


def test_announcement_enters_after_its_base_only() -> None:
    """I11: a uid enters the list with the checkpoint that follows the base it was announced for, or never."""
    assert uids_after(announced=(Announcement(snapshot("a"), BASE),)) == ["a"]
    assert uids_after(announced=(Announcement(snapshot("a"), replace(BASE, uid="other")),)) == []
    assert uids_after(announced=(Announcement(snapshot("a"), replace(BASE, generation=1)),)) == []


def test_newer_announcement_of_a_table_replaces_the_older() -> None:
    """A table has one snapshot under way; a dead process's entry is dropped when the next one is announced."""
    new = (Announcement(snapshot("new", 9), BASE),)
    assert uids_after(snapshot("old"), snapshot("b", 8, RIGHT), announced=new) == ["b", "new"]


def test_snapshot_of_a_removed_operator_is_let_go() -> None:
    """I12: no checkpoint takes a snapshot of a table that was given up."""
    assert uids_after(snapshot("a"), operators=[OperatorInfo("op", 2, "", {}, kind=REMOVED)]) == []


@pytest.mark.parametrize(
    "let_go",
    [
        snapshot("a", key_groups=KeyGroupRange(0, 127)),
        snapshot("a", operator="gone"),
        snapshot("a", version=3),
    ],
    ids=["rescaled", "operator removed", "older than the state's"],
)
def test_what_is_of_no_use_is_let_go(let_go: UnderWaySnapshot) -> None:
    """I12: entries that no checkpoint can use any more leave the list, and their objects are collected."""
    newer = MaterializationHandle("op", LEFT, 3, "newer", "key", 1)
    assert uids_after(let_go, snapshot("b", 8, RIGHT), materializations=(newer,)) == ["b"]


def test_what_nobody_finishes_is_let_go_at_last() -> None:
    """I12: a dead process's snapshot leaves the list after a number of checkpoints, not after a time."""
    last = CheckpointRef(7 + CHECKPOINTS_MAX, 0, "base")
    assert uids_after(snapshot("a"), base=last) == ["a"]
    assert uids_after(snapshot("a"), base=replace(last, id=last.id + 1)) == []


def test_claimed_parallelism_costs_nothing() -> None:
    """C27: operators of any parallelism are not taken apart into tables, of which a request may claim millions."""
    operators = [OperatorInfo(f"op-{number}", 32_768, "{}", {}) for number in range(1_000)]
    of_one = [snapshot("a", key_groups=KeyGroupRange(5, 5), operator="op-9"), snapshot("b", operator="op-7")]

    tracemalloc.start()
    try:
        listed = followed(UnderWay(tuple(of_one)), BASE, (), (), operators, (), 32_768)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert [item.uid for item in listed] == ["a"]


def test_each_table_finds_its_own_snapshot_at_once() -> None:
    """A job of thousands of tables asks for each of them, for each checkpoint: none looks through the whole list."""
    tables = [snapshot(f"u{n}", key_groups=KeyGroupRange(n, n)) for n in range(100)]
    under_way = UnderWay(tuple(tables), ("compaction",))

    assert [under_way.snapshot_of("op", KeyGroupRange(n, n)) for n in range(100)] == tables
    assert under_way.snapshot_of("other", KeyGroupRange(0, 0)) is None
    assert under_way.uids is under_way.uids == {*(item.uid for item in tables), "compaction"}
    assert under_way == UnderWay(tuple(tables), ("compaction",))


def test_manifest_keeps_the_list() -> None:
    """A manifest's list is read back unchanged; a manifest without a list is written as before."""
    listed = UnderWay((snapshot("a"), snapshot("c", 7, RIGHT), snapshot("b", 8, RIGHT, "other")), ("compaction",))
    written = replace(manifest(), under_way=listed)

    assert decode_manifest(encode_manifest(written), "key") == written
    assert b"under_way" not in encode_manifest(manifest())


def test_list_of_a_large_job_is_short() -> None:
    """A thousand concurrent snapshots cost each manifest less than the segments that it names anyway."""
    tables = [snapshot(f"{n:032x}", 7, key_group_range(n, 1000, 4096)) for n in range(1000)]
    with_list = encode_manifest(replace(manifest(), under_way=UnderWay(tuple(tables))))

    assert len(with_list) - len(encode_manifest(manifest())) < 60_000


@pytest.mark.parametrize(
    "data", [None, {}, {"base": "1.0.u"}, {**Announcement(snapshot("a"), BASE).to_dict(), "uid": "../x"}]
)
def test_damaged_announcement_is_refused(data: object) -> None:
    """A malformed announcement is refused."""
    with pytest.raises(InvalidInputError):
        Announcement.from_dict(data)


@pytest.mark.parametrize(
    ("key", "uid"),
    [
        ("job/materialized/op/0-63/abc.json", "abc"),
        ("job/materialized/op/0-63/abc=0123-60.sst", "abc"),
        ("job/materialized/op/0-63/abc=0123-60.meta", "abc"),
        ("job/segments/host/abc=12.seg", "abc"),
        ("job/segments/host/abc.seg", None),
        ("job/materialized/op/0-63/0123-60.sst", None),
    ],
)
def test_key_tells_whose_object_it_is(key: str, uid: str | None) -> None:
    """I11: objects of snapshots and compactions carry the uid; sets of a batch do not."""
    assert uid_in_key(key) == uid
