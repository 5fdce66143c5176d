"""Which partitions of an operator are compacted, and which are left to materialization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dstl_service.compaction.compactor import Compactor
from dstl_service.compaction.plan import (
    Compaction,
    CompactionSettings,
    Replacement,
    apply,
    choose_compactions,
    log_size,
)
from dstl_service.formats.manifest import StateView
from dstl_service.restore.segment_cache import SegmentCache
from dstl_service.restore.truncation import Counting, truncate
from dstl_service.wire import SET_ASIDE, SINK, OperatorInfo
from storage.change_set import decode_change_set, encode_change_set
from storage.key_groups import KeyGroupRange, key_group_range
from storage.memory_store import MemoryStore
from storage.model import ChangeSetId, MaterializationHandle, Segment, SegmentHandle, SegmentKind, Writer
from tests.unit.dstl_service.samples import handles_of, stored

OPERATOR = OperatorInfo("op", 2, "{}", {})
ALL, FIRST, SECOND = KeyGroupRange(0, 7), KeyGroupRange(0, 3), KeyGroupRange(4, 7)
SETTINGS = CompactionSettings(floor_bytes=1, log_ratio_max=0.01, segments_max=10, base_bytes_max=1000)


def segment_of(
    checkpoint_id: int, key_groups: KeyGroupRange, size_bytes: int, kind: SegmentKind = SegmentKind.CHANGES
) -> SegmentHandle:
    """Return a segment of the log."""
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, 1), key_groups.first // 4, 0)
    key = f"job/segments/host/{checkpoint_id}-{key_groups.to_text()}-{kind.name}.seg"
    return handles_of([Segment.of(set_id, key_groups, 1, b"x" * size_bytes, kind)], key)[0]


def view_of(*log: SegmentHandle) -> StateView:
    """Return a state that was materialized once, before all of this log."""
    return StateView((MaterializationHandle("op", ALL, 0, "uid", "index", 100),), list(log))


def chosen(view: StateView) -> list[Compaction]:
    """Return the due compaction."""
    return choose_compactions(view, [OPERATOR], {"op": log_size(view, "op")}, 9, 8, SETTINGS)


def partitions(compactions: Sequence[Compaction]) -> list[int]:
    """Return the partitions that are compacted."""
    return [output.partition for compaction in compactions for output in compaction.outputs]


def test_too_large_partition_is_left_alone() -> None:
    """I9: after a materialization, exactly those partitions are compacted whose log is within the bound."""
    small = [segment_of(number, SECOND, 400) for number in (1, 2)]
    large = [segment_of(number, FIRST, 600) for number in (1, 2)]

    found = chosen(view_of(*small, *large))

    assert partitions(found) == [1]
    assert found[0].inputs == set(small)


def test_partition_left_alone_makes_nothing_due() -> None:
    """A partition left to materialization does not trigger a compaction of the others at every checkpoint."""
    small = [segment_of(number, SECOND, 400) for number in (1, 2)]
    view = view_of(*small, *(segment_of(number, FIRST, 600) for number in range(1, 20)))
    (compaction,) = chosen(view)

    after = apply(view, Replacement(compaction, (segment_of(9, SECOND, 300, SegmentKind.COMPACTED),), "uid"))

    assert after is not None
    assert len(after.log) == 20
    assert chosen(after) == []


@pytest.mark.parametrize("spanning", [ALL, KeyGroupRange(3, 4)])
def test_neighbour_of_large_partition_is_left_alone(spanning: KeyGroupRange) -> None:
    """I14: a partition that shares a segment with an excluded one is excluded too: both still need the segment."""
    large = [segment_of(number, FIRST, 600) for number in (2, 3)]

    assert chosen(view_of(segment_of(1, spanning, 100), *large, segment_of(2, SECOND, 100))) == []


def halves(*materialized: MaterializationHandle) -> StateView:
    """Return a state of two partitions with a log each, materialized as given."""
    log = [segment_of(number, half, 200) for number in (3, 4) for half in (FIRST, SECOND)]
    return StateView(materialized, log)


def snapshot(key_groups: KeyGroupRange, checkpoint_id: int) -> MaterializationHandle:
    """Return a materialization."""
    return MaterializationHandle("op", key_groups, checkpoint_id, f"uid-{checkpoint_id}", "index", 100)


def test_result_enters_beside_a_partition_that_was_materialized_meanwhile() -> None:
    """A snapshot of one table invalidates only its part of a compaction; else many tables would never be compacted."""
    first, second = snapshot(FIRST, 1), snapshot(SECOND, 2)
    (compaction,) = chosen(halves(first, second))
    made = tuple(segment_of(9, half, 300, SegmentKind.COMPACTED) for half in (FIRST, SECOND))
    meanwhile = truncate(halves(first, second), [snapshot(FIRST, 3)])

    after = apply(meanwhile, Replacement(compaction, made, "uid"))

    assert after is not None
    assert after.log == [made[1], segment_of(4, FIRST, 200)]


def test_result_enters_beside_a_partition_that_was_too_large_to_merge() -> None:
    """I9: a log too large when uncompressed, which no plan can know, excludes only its own partition."""
    view = halves(snapshot(ALL, 2))
    (compaction,) = chosen(view)
    merged = segment_of(9, SECOND, 300, SegmentKind.COMPACTED)

    after = apply(view, Replacement(compaction, (merged,), "uid", too_large=frozenset({0})))

    assert after is not None
    assert after.log == [merged, segment_of(3, FIRST, 200), segment_of(4, FIRST, 200)]


def one_change(checkpoint_id: int, key_groups: KeyGroupRange, value: bytes | None) -> Segment:
    """Return a change set of one key, which is deleted without a value."""
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, 1), 0, 0)
    return Segment.of(set_id, key_groups, 1, encode_change_set({bytes([0, key_groups.first]): value}))


def filled(checkpoint_id: int, key_groups: KeyGroupRange, value: bytes) -> Segment:
    """Return a change set of nine keys with one value."""
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, 1), key_groups.first // 4, 0)
    changes = {bytes([0, key_groups.first, key]): value for key in range(9)}
    return Segment.of(set_id, key_groups, len(changes), encode_change_set(changes))


def test_log_that_is_too_large_uncompressed_is_not_merged() -> None:
    """I9: the compactor reports the partition as too large, and merges the other one."""
    store, cache = MemoryStore(), SegmentCache(1 << 20)
    log = [
        stored(store, [segment], f"job/segments/host/{segment.id.checkpoint_id}-{segment.key_groups.first}.seg")[0]
        for checkpoint_id in (3, 4)
        for segment in (filled(checkpoint_id, FIRST, bytes(2_000)), filled(checkpoint_id, SECOND, b"small"))
    ]
    view = StateView((snapshot(ALL, 2),), log)
    settings = replace(SETTINGS, base_bytes_max=1 << 20)
    (compaction,) = choose_compactions(view, [OPERATOR], {"op": log_size(view, "op")}, 9, 8, settings)

    merged = [
        Compactor(store, cache, None, None, 20_000)._merge("job", 1, compaction, output, {})  # type: ignore[arg-type]
        for output in compaction.outputs
    ]

    assert merged[0] is None
    assert merged[1] is not None
    assert [segment.id.partition for segment in merged[1]] == [1]


def test_result_of_materialized_partitions_does_not_enter() -> None:
    """A result is dropped if all of its partitions were materialized meanwhile."""
    (compaction,) = chosen(halves(snapshot(ALL, 2)))
    made = tuple(segment_of(9, half, 300, SegmentKind.COMPACTED) for half in (FIRST, SECOND))

    assert apply(halves(snapshot(ALL, 3)), Replacement(compaction, made, "uid")) is None


def test_partition_with_nothing_left_has_an_empty_base() -> None:
    """I14: a snapshot from before the last key was deleted is refused, however late it comes."""
    store = MemoryStore()
    log = [
        stored(store, [one_change(checkpoint_id, FIRST, value)], f"job/segments/host/{checkpoint_id}.seg")[0]
        for checkpoint_id, value in ((3, b"value"), (4, None))
    ]
    view = StateView((), log)
    settings = replace(SETTINGS, floor_bytes=1, base_bytes_max=1 << 20)
    (compaction,) = choose_compactions(view, [OPERATOR], {"op": log_size(view, "op")}, 9, 8, settings)
    compactor = Compactor(store, SegmentCache(1 << 20), None, None, 1 << 20)  # type: ignore[arg-type]

    merged = compactor._merge("job", 1, compaction, compaction.outputs[0], {})
    assert merged is not None
    after = apply(view, Replacement(compaction, tuple(handles_of(merged)), "uid"))

    assert after is not None
    assert [list(decode_change_set(segment.payload, "base")) for segment in merged] == [[]]
    assert not Counting(after).would_count(snapshot(FIRST, 3))
    assert truncate(after, [snapshot(FIRST, 3)]) == after
    assert truncate(after, [snapshot(FIRST, 10)]).log == []


def test_compactions_of_many_tables_enter() -> None:
    """The log of 100 tables stays short although snapshots of some enter with every checkpoint."""
    operator, settings = OperatorInfo("op", 100, "{}", {}), CompactionSettings(segments_max=500)
    ranges = [key_group_range(partition, 100, 128) for partition in range(100)]
    view, waiting = StateView((), []), None
    for checkpoint_id in range(60):
        view = truncate(view, [table_snapshot(ranges[n], checkpoint_id - 1) for n in range(checkpoint_id, 100, 60)])
        if waiting is not None:
            view = apply(view, waiting) or view
            waiting = None
        view = replace(view, log=[*view.log, *(table_segment(n, ranges[n], checkpoint_id) for n in range(100))])
        sizes = {"op": log_size(view, "op")}
        for compaction in choose_compactions(view, [operator], sizes, checkpoint_id, 128, settings):
            made = (
                table_segment(output.partition, output.key_groups, checkpoint_id, output.kind)
                for output in compaction.outputs
            )
            waiting = Replacement(compaction, tuple(made), "uid")
        assert len(view.log) <= 900


def table_snapshot(key_groups: KeyGroupRange, checkpoint_id: int) -> MaterializationHandle:
    """Return a materialization of one of many tables."""
    uid = f"uid-{key_groups.first}-{checkpoint_id}"
    return MaterializationHandle("op", key_groups, max(0, checkpoint_id), uid, f"index-{uid}", 100)


def table_segment(
    partition: int, key_groups: KeyGroupRange, checkpoint_id: int, kind: SegmentKind = SegmentKind.CHANGES
) -> SegmentHandle:
    """Return a segment of one of many tables."""
    set_id = ChangeSetId("job", "op", checkpoint_id, Writer(1, 1), partition, 0)
    key = f"job/segments/host/{checkpoint_id}-{partition}-{kind.name}.seg"
    return handles_of([Segment.of(set_id, key_groups, 1, b"x" * 100, kind)], key)[0]


def test_log_of_many_segments_waits_until_much_of_it_is_new() -> None:
    """A checkpoint of 1,000 tables has 1,000 segments; a long log is not rewritten for each of them."""
    settings = CompactionSettings(floor_bytes=10**9, segments_max=10)

    def is_chosen(compacted_bytes: int, segments: int) -> bool:
        compacted = segment_of(1, FIRST, compacted_bytes, SegmentKind.COMPACTED)
        view = view_of(compacted, *(segment_of(2 + number, FIRST, 10) for number in range(segments)))
        return choose_compactions(view, [OPERATOR], {"op": log_size(view, "op")}, 99, 8, settings) != []

    assert is_chosen(330, 11)
    assert not is_chosen(5000, 11)
    assert not is_chosen(5000, 40)
    assert is_chosen(5000, 41)


@pytest.mark.parametrize("kind", [SINK, SET_ASIDE])
def test_rows_in_the_log_are_not_compacted(kind: str) -> None:
    """Their keys are those of their place in the log: merged by key, output and rows set aside would be lost."""
    view = view_of(*(segment_of(number, ALL, 400) for number in range(1, 3)))
    assert chosen(view)
    beside = replace(OPERATOR, kind=kind)
    assert choose_compactions(view, [beside], {"op": log_size(view, "op")}, 9, 8, SETTINGS) == []
