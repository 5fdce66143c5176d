"""The output of an earlier run that a start publishes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend_client.sinks.slot_publishing import Target
from backend_client.spark.output.stored_sinks import check_columns, first_target, steps_to
from dstl_service.wire import (
    BRANCH_GENERATIONS,
    CLOSED_SINK,
    SINK,
    CheckpointInfo,
    CheckpointRef,
    FormerSlots,
    OperatorInfo,
)
from storage.errors import InvalidInputError

REF = CheckpointRef(9, 0, "m9")


def latest(rewound_from: CheckpointRef | None = None) -> CheckpointInfo:
    return CheckpointInfo(
        ref=REF,
        base=None,
        epoch=1,
        created_ms=0,
        query_id="q",
        offsets="",
        operators=[],
        segments=0,
        segment_bytes=0,
        rewound_from=rewound_from,
    )


def sink(kind: str = SINK, published: int | None = None) -> OperatorInfo:
    return OperatorInfo("output", 2, "S", {}, kind=kind, published=published)


@pytest.mark.parametrize(
    ("stored", "slots", "target", "must_end"),
    [
        (sink(), 2, Target(REF), False),
        (sink(published=7), 2, Target(REF, marked_slots=2, published=7), False),
        (sink(published=7), 1, Target(REF, marked_slots=2, published=7), True),
        (sink(published=7), 3, Target(REF, starts_branch=True, marked_slots=2, published=7), True),
        (sink(CLOSED_SINK, 7), 2, Target(REF, starts_branch=True, given_up=7, used_slots=0), True),
        (sink(CLOSED_SINK), 2, Target(REF, starts_branch=True, used_slots=0), True),
        (None, 2, Target(REF, starts_branch=True, used_slots=0), True),
    ],
)
def test_what_a_start_publishes(stored: OperatorInfo | None, slots: int, target: Target, must_end: bool) -> None:
    """New slots, and sinks that the newest checkpoint does not use, may have markers from before a rewind."""
    assert first_target(latest(), stored, slots) == (target, must_end)


def test_start_knows_the_recent_checkpoints_of_a_sink() -> None:
    """Not those of one that comes back, and the end of a branch only where a rewind and no rebuild has told it."""
    recent = (CheckpointRef(8, 0, "m8"), CheckpointRef(11, 0, "m11"))
    stored = replace(sink(published=8), recent=list(recent))
    for end, known in ((recent[-1], recent[-1]), (REF, None)):
        target, _ = first_target(latest(end), stored, 2)
        assert (target.recent, target.given_up_from) == (recent, known)
    assert first_target(latest(recent[-1]), replace(stored, kind=CLOSED_SINK), 2)[0].recent == ()


def test_start_knows_the_checkpoints_of_its_job() -> None:
    """A slot may have published one that the job lost, and whose id has come again since."""
    older = replace(latest(), ref=CheckpointRef(8, 0, "m8"), operators=[replace(sink(), parallelism=5)])
    newest = replace(latest(), base=older.ref)
    target, _ = first_target(newest, sink(), 2, [older, newest])
    assert (target.stored, target.used_slots) == ((older.ref, REF), 5)
    assert first_target(newest, sink(), 2, [newest])[0].used_slots == 1
    assert first_target(newest, sink(CLOSED_SINK), 2, [older, newest])[0].used_slots == 0
    savepoint = replace(latest(REF), base=CheckpointRef(8, 0, "gone"))
    assert first_target(savepoint, sink(), 2, [savepoint])[0].stored == (savepoint.base, REF)
    assert first_target(replace(savepoint, rewound_from=None), sink(), 2, [savepoint])[0].stored == (REF,)
    came_back = replace(older, operators=[sink(CLOSED_SINK)])
    assert first_target(newest, sink(), 2, [came_back, newest])[0].used_slots == 1


def test_start_knows_slots_that_went_out_of_use() -> None:
    """Not those of a sink that comes back: it may have got another system."""
    former = FormerSlots(4, CheckpointRef(8, 0, "m8"))
    target, must_end = first_target(latest(), replace(sink(published=7), former_slots=former), 2)
    assert (target.former_slots, target.starts_branch, must_end) == (former, False, False)
    assert first_target(latest(), replace(sink(CLOSED_SINK, 7), former_slots=former), 2)[0].former_slots is None


def test_start_after_a_rewind() -> None:
    """All slots are published to where the branch begins, before anything is built on it."""
    assert first_target(latest(REF), sink(), 2) == (Target(REF, starts_branch=True), True)


def test_start_publishes_one_checkpoint_after_the_other() -> None:
    """Not those of other branches, nor what is published, nor in front of a branch's first one."""
    stored = (CheckpointRef(7, BRANCH_GENERATIONS, "other"), *(CheckpointRef(i, 0, f"m{i}") for i in (5, 6, 8)), REF)
    target = Target(REF, marked_slots=2, published=5, stored=stored)
    assert [step.checkpoint.id for step in steps_to(target)] == [6, 8, 9]
    assert steps_to(target)[-1] == target
    assert [step.checkpoint.id for step in steps_to(replace(target, published=None))] == [5, 6, 8, 9]
    assert steps_to(replace(target, starts_branch=True)) == [replace(target, starts_branch=True)]


def test_columns_of_one_name_are_refused() -> None:
    """No sink could tell them apart."""
    check_columns(["k", "K", "v"])
    with pytest.raises(InvalidInputError, match="the result has several columns k: rename all but one"):
        check_columns(["k", "v", "k"])
