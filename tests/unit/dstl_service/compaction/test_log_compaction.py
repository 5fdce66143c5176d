"""Which partitions of an operator are compacted, and which are left to materializations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dstl_service.compaction.plan import (
    Compaction,
    CompactionSettings,
    Replacement,
    apply,
    choose_compactions,
    log_size,
)
from dstl_service.formats.manifest import StateView
from dstl_service.wire import OperatorInfo
from storage.model import ChangeSetId, KeyGroupRange, MaterializationHandle, Segment, SegmentHandle, SegmentKind, Writer
from tests.unit.dstl_service.samples import handles_of

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
    """Return what is due."""
    return choose_compactions(view, [OPERATOR], {"op": log_size(view, "op")}, 9, 8, SETTINGS)


def partitions(compactions: Sequence[Compaction]) -> list[int]:
    """Return the partitions that are compacted."""
    return [output.partition for compaction in compactions for output in compaction.outputs]


def test_too_large_partition_is_left_alone() -> None:
    """I9: of the partitions behind a materialization those whose log is within the bound are compacted, no other."""
    small = [segment_of(number, SECOND, 400) for number in (1, 2)]
    large = [segment_of(number, FIRST, 600) for number in (1, 2)]

    found = chosen(view_of(*small, *large))

    assert partitions(found) == [1]
    assert found[0].inputs == set(small)


def test_partition_left_alone_makes_nothing_due() -> None:
    """What stays for a materialization does not have the rest compacted again at every checkpoint."""
    small = [segment_of(number, SECOND, 400) for number in (1, 2)]
    view = view_of(*small, *(segment_of(number, FIRST, 600) for number in range(1, 20)))
    (compaction,) = chosen(view)

    after = apply(view, Replacement(compaction, (segment_of(9, SECOND, 300, SegmentKind.COMPACTED),), "uid"))

    assert after is not None
    assert len(after.log) == 20
    assert chosen(after) == []


@pytest.mark.parametrize("spanning", [ALL, KeyGroupRange(3, 4)])
def test_neighbour_of_large_partition_is_left_alone(spanning: KeyGroupRange) -> None:
    """I14: a partition that shares a segment with one that is left alone is left alone: the segment stays for both."""
    large = [segment_of(number, FIRST, 600) for number in (2, 3)]

    assert chosen(view_of(segment_of(1, spanning, 100), *large, segment_of(2, SECOND, 100))) == []
