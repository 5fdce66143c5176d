"""The contents of a checkpoint, decided without I/O."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dstl_service.checkpoints.builder import TEXT_CHARS_MAX, Base, CheckpointBuilder, check_follows, check_size
from dstl_service.formats.checkpoint_record import decode_record
from dstl_service.formats.manifest import COMPLETE_EVERY, ManifestKind, StateView
from dstl_service.formats.under_way import Announcement, UnderWay, UnderWaySnapshot
from dstl_service.materialization.admission import Reported
from dstl_service.wire import CheckpointRef, CompleteRequest, OperatorInfo, StateInfo
from storage.errors import ConflictError, InvalidInputError
from tests.unit.dstl_service.samples import handles_of, segment
from tests.unit.dstl_service.snapshots import GROUPS, index_of

BUILDER = CheckpointBuilder("job", "job-uid", 128)
REF = CheckpointRef(6, 0, "base")
LOG = handles_of([segment(checkpoint_id=number) for number in (5, 6)])
BASE = Base(REF, StateView((), LOG), UnderWay())
REQUEST = CompleteRequest(3, "uid", REF, [], [OperatorInfo("op", 1, "{}", {})])
TAKEN = index_of(CheckpointRef(5, 0, "five"), uid="taken").handle("job")


def unchanged(view: StateView, _: UnderWay) -> tuple[StateView, tuple[str, ...]]:
    """Add no compaction."""
    return view, ()


def test_nothing_but_sets_is_a_delta() -> None:
    """Where nothing replaces a part of the log, the manifest holds only the checkpoint's additions."""
    planned = BUILDER.plan(7, REQUEST, BASE, Reported(), unchanged)
    made = BUILDER.manifest(planned, handles_of([segment(checkpoint_id=7)]), None, 5)

    assert (made.kind, made.earlier, made.base, len(made.segments)) == (ManifestKind.DELTA, (), REF, 1)
    assert planned.record.start is None


def test_taken_snapshot_makes_a_complete_manifest() -> None:
    """An accepted snapshot replaces the log up to its checkpoint, in the note and in the manifest."""
    planned = BUILDER.plan(7, REQUEST, BASE, Reported(taken=[TAKEN]), unchanged)
    made = BUILDER.manifest(planned, [], None, 5)

    assert (made.kind, made.materializations, made.earlier) == (ManifestKind.COMPLETE, (TAKEN,), (LOG[1],))
    assert planned.record.start == StateView((TAKEN,), [LOG[1]])


def test_compaction_makes_a_complete_manifest() -> None:
    """A compaction that fits replaces parts of the log; one that is under way is listed."""
    planned = BUILDER.plan(7, REQUEST, BASE, Reported(), lambda view, _: (replace(view, log=LOG[1:]), ("next",)))

    assert planned.record.start == StateView((), LOG[1:])
    assert planned.under_way == UnderWay((), ("next",))


def test_complete_manifest_is_due_now_and_then() -> None:
    """A complete manifest is due at a fixed interval, so that no restore reads more manifests than that."""
    base = replace(BASE, ref=CheckpointRef(COMPLETE_EVERY - 1, 0, "base"))
    request = replace(REQUEST, base=base.ref)

    assert BUILDER.plan(COMPLETE_EVERY, request, base, Reported(), unchanged).record.start == BASE.state


def test_announced_snapshots_are_listed() -> None:
    """Snapshots announced for the base are listed; those taken, or refused for good, are dropped from the list."""
    kept, gone = (UnderWaySnapshot("op", GROUPS, REF, uid) for uid in ("kept", "gone"))
    reported = Reported(announced=[Announcement(kept, REF)], refused={"gone"})
    planned = BUILDER.plan(7, REQUEST, replace(BASE, under_way=UnderWay((gone,))), reported, unchanged)

    assert planned.under_way.snapshots == (kept,)


def test_note_is_named_only_where_its_object_is_not() -> None:
    """The manifest names the note's object, unless the object also holds one of its change sets."""
    planned = BUILDER.plan(7, REQUEST, BASE, Reported(), unchanged)
    (note,) = handles_of([planned.note], "job/segments/host/note.seg")

    assert BUILDER.manifest(planned, LOG, note, 5).note == note
    assert BUILDER.manifest(planned, [note], note, 5).note is None


@pytest.mark.parametrize(("checkpoint_id", "base"), [(1, None), (6, REF), (8, REF)])
def test_gap_is_refused(checkpoint_id: int, base: CheckpointRef | None) -> None:
    """I4: a checkpoint directly follows its base, at the place of a newer epoch's fence."""
    with pytest.raises(ConflictError, match="cannot follow"):
        check_follows(checkpoint_id, base)


@pytest.mark.parametrize("place", ["offsets", "key schema", "schema", "earlier schemas"])
def test_long_texts_are_refused(place: str) -> None:
    """I9: every retained checkpoint keeps its texts in memory, so all of them are bounded."""
    half = "x" * ((TEXT_CHARS_MAX - 110) // 2)  # the state counts 110, with its name and kind

    def request(text: str) -> CompleteRequest:
        texts = {name: text if name == place else "" for name in ("key schema", "schema", "earlier schemas")}
        state = StateInfo(0, "value", texts["schema"], [texts["earlier schemas"]])
        operator = OperatorInfo("op", 1, texts["key schema"], {"state": state})
        return replace(REQUEST, offsets=half + (text if place == "offsets" else ""), operators=[operator])

    check_size(request(half))

    with pytest.raises(InvalidInputError, match="characters"):
        check_size(request(half + "x"))


def test_many_states_are_refused() -> None:
    """I9: states without long texts take memory in each checkpoint that is listed, so their number is bounded, too."""

    def request(states: int) -> CompleteRequest:
        found = {f"state-{number}": StateInfo(0, "value", "") for number in range(states)}
        return replace(REQUEST, operators=[OperatorInfo("op", 1, "{}", found)])

    check_size(request(10_000))

    with pytest.raises(InvalidInputError, match="states have"):
        check_size(request(50_000))


def test_record_says_when_it_was_planned() -> None:
    """I10: the coordinator's own time orders the tries at a checkpoint, whichever hosts store their notes."""
    planned = BUILDER.plan(7, REQUEST, BASE, Reported(), unchanged, 1234)

    assert decode_record(planned.note.payload, "note").planned_ms == 1234
    assert decode_record(BUILDER.plan(7, REQUEST, BASE, Reported(), unchanged).note.payload, "note").planned_ms == 0
