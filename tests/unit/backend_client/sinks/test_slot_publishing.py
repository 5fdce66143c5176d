"""The output that is published after a crash, and its publisher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from backend_client.sinks.protocol import Marker, Sink, Slot, SlotPublisher
from backend_client.sinks.slot_publishing import LoggedRecords, Target, is_due, publish_slot
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef, FormerSlots
from storage.errors import ConflictError, FencedError, InvalidInputError

SLOT = Slot("job", "uid", "output", 3)


def ref(checkpoint_id: int, branch: int = 0) -> CheckpointRef:
    return CheckpointRef(checkpoint_id, branch * BRANCH_GENERATIONS, f"m{checkpoint_id}-{branch}")


class MemorySink(Sink):
    """Keeps a slot's marker and records in this process."""

    def __init__(self, marker: Marker | None = None) -> None:
        self.marker = marker
        self.records: list[int] = []
        self.closed = 0

    def check(self, columns: pa.Schema, slots: object) -> None:
        """Do nothing."""

    def open(self, slot: Slot) -> SlotPublisher:
        """Return the only publisher."""
        return MemoryPublisher(self)


class MemoryPublisher(SlotPublisher):
    def __init__(self, sink: MemorySink) -> None:
        self._sink = sink

    def last_published(self) -> Marker | None:
        """Return the sink's marker."""
        return self._sink.marker

    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """Add the records."""
        new = [value for batch in records for value in batch.column(0).to_pylist()]
        self._sink.records += new
        self._sink.marker = marker
        return len(new)

    def close(self) -> None:
        """Count."""
        self._sink.closed += 1


LOG = {(1, 0): [10], (1, 1): [11], (1, 2): [12], (7, 1): [71], (7, 2): [72]}
"""Output by epoch and checkpoint id; epoch 7 began by a rewind to checkpoint 0."""


def reader(asked: list[CheckpointRef | None], *, epochs: tuple[int, ...], to: int) -> object:
    def read(after: CheckpointRef | None) -> Iterator[LoggedRecords]:
        asked.append(after)
        for (epoch, checkpoint_id), values in LOG.items():
            if epoch in epochs and checkpoint_id <= to:
                yield LoggedRecords(epoch, checkpoint_id, iter([pa.record_batch({"v": values})]))

    return read


def publish(sink: MemorySink, target: Target, epochs: tuple[int, ...] = (1,)) -> list[CheckpointRef | None]:
    asked: list[CheckpointRef | None] = []
    publish_slot(sink, SLOT, reader(asked, epochs=epochs, to=target.checkpoint.id), target)  # type: ignore[arg-type]
    return asked


def test_everything_is_published_once() -> None:
    """A repeated call publishes nothing, a later one only what is new; each closes the publisher."""
    sink = MemorySink()
    assert publish(sink, Target(ref(1))) == [None]
    assert publish(sink, Target(ref(1))) == []
    assert publish(sink, Target(ref(0))) == []
    assert publish(sink, Target(ref(2))) == [ref(1)]
    assert sink.records == [10, 11, 12]
    assert sink.closed == 4
    assert sink.marker == Marker("uid", 3, ref(2))


def test_rewinds_publish_new_output_and_nothing_twice() -> None:
    """Back to 0 after 1 was published, new output, then forward to the first branch's checkpoint 2."""
    sink = MemorySink()
    publish(sink, Target(ref(1)))
    publish(sink, Target(ref(0, 7), starts_branch=True))
    assert sink.records == [10, 11]
    publish(sink, Target(ref(1, 7)), epochs=(7,))
    assert sink.records == [10, 11, 71]
    publish(sink, Target(ref(2, 9), starts_branch=True), epochs=(1,))
    assert sink.records == [10, 11, 71, 12]
    assert sink.marker == Marker("uid", 3, ref(2, 9), ((0, 2), (7, 1)))
    publish(sink, Target(ref(2, 11), starts_branch=True), epochs=(7,))
    assert sink.records == [10, 11, 71, 12, 72]
    publish(sink, Target(ref(2, 13), starts_branch=True), epochs=(1,))
    assert sink.records == [10, 11, 71, 12, 72]


def test_first_output_after_a_rewind_is_not_published_again() -> None:
    """The sink was away from the beginning to the rewind; then the job goes back to the first branch."""
    sink = MemorySink()
    publish(sink, Target(ref(1, 7), starts_branch=True), epochs=(1,))
    assert sink.records == [10, 11]
    assert sink.marker == Marker("uid", 3, ref(1, 7), ((0, 1),))
    publish(sink, Target(ref(2, 9), starts_branch=True), epochs=(1,))
    assert sink.records == [10, 11, 12]


def test_first_output_of_a_new_branch_is_of_that_branch() -> None:
    """Nothing that a driver of the new branch logged counts as published on an earlier one."""
    sink = MemorySink()
    publish(sink, Target(ref(1, 7), starts_branch=True), epochs=(7,))
    assert (sink.records, sink.marker) == ([71], Marker("uid", 3, ref(1, 7)))
    publish(sink, Target(ref(2, 9), starts_branch=True), epochs=(1,))
    assert sink.records == [71, 10, 11, 12]


def test_output_that_was_given_up_is_not_published() -> None:
    """Not with the checkpoint that follows, and not after a rewind to one before."""
    sink = MemorySink()
    publish(sink, Target(ref(0)))
    publish(sink, Target(ref(2), given_up=1))
    assert (sink.records, sink.marker) == ([10, 12], Marker("uid", 3, ref(2)))
    publish(sink, Target(ref(1, 9), starts_branch=True))
    assert sink.records == [10, 12]


def test_publisher_from_before_a_rewind_stops() -> None:
    """A driver that was paused over a rewind must not publish what was given up."""
    sink = MemorySink(Marker("uid", 3, ref(0, 7), ((0, 1),)))
    with pytest.raises(FencedError, match="was rewound by epoch 7: output of checkpoint 2"):
        publish(sink, Target(ref(2)))
    assert sink.closed == 1


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (Marker("other", 3, ref(0)), "has the marker of another job"),
        (Marker("uid", 3, ref(5)), "was not published after it"),
    ],
)
def test_markers_that_do_not_fit_are_errors(marker: Marker, message: str) -> None:
    """Nothing is guessed: publishing from there could lose or repeat output."""
    with pytest.raises(ConflictError, match=message):
        is_due(marker, SLOT, Target(ref(1, 7)))


def test_lost_marker_is_an_error() -> None:
    """The log may still have output that was published; only a slot that is new has no marker."""
    with pytest.raises(ConflictError, match=r"slot 3 .* its marker is gone: .* give the sink another name"):
        is_due(None, SLOT, Target(ref(1), marked_slots=4))
    assert is_due(None, SLOT, Target(ref(1), marked_slots=3))


@pytest.mark.parametrize(
    ("at", "target", "is_set_back"),
    [
        (5, Target(ref(9), marked_slots=4, published=6), True),
        (6, Target(ref(9), marked_slots=4, published=6), False),
        (5, Target(ref(9), marked_slots=3, published=6), False),
        (5, Target(ref(9), marked_slots=4), False),
        (None, Target(ref(9), marked_slots=4, published=6), False),
    ],
)
def test_system_that_was_set_back(at: int | None, target: Target, is_set_back: bool) -> None:
    """A slot in use stands before what the job knows to be published; a slot that was not in use may."""
    assert target.is_set_back(SLOT, at) is is_set_back


@pytest.mark.parametrize(
    ("published", "target"),
    [
        (CheckpointRef(2, 0, "lost"), Target(ref(2))),
        (CheckpointRef(2, 0, "lost"), Target(ref(1), is_first=True)),
        (CheckpointRef(2, 7 * BRANCH_GENERATIONS, "lost"), Target(ref(1, 7), starts_branch=True, is_first=True)),
        (CheckpointRef(2, 0, "lost"), Target(ref(3), is_first=True, stored=(ref(1), ref(2), ref(3)))),
        (CheckpointRef(2, 0, "lost"), Target(ref(3, 7), True, is_first=True, stored=(ref(2), ref(3, 7)))),
    ],
)
def test_lost_checkpoint_is_an_error(published: CheckpointRef, target: Target) -> None:
    """I3: a storage that was set back: new output under the id of what was published is not taken for published."""
    sink = MemorySink(Marker("uid", 3, published))
    with pytest.raises(
        ConflictError, match=r"published checkpoint 2\..*\.lost, which job 'job' does not have: .* before"
    ):
        publish(sink, target)
    assert (sink.records, sink.closed) == ([], 1)


def test_job_that_went_on_after_it_was_set_back_is_rewound_far_enough() -> None:
    """Output that came again must be computed again: after a rewind to a later checkpoint it counts as published."""
    target = Target(ref(9), is_first=True, marked_slots=4, published=3, stored=(ref(8), ref(9)))
    with pytest.raises(ConflictError, match="Rewind the job to checkpoint 3, or one before"):
        is_due(Marker("uid", 3, CheckpointRef(8, 0, "lost")), SLOT, target)
    with pytest.raises(FencedError, match=r"set back: Rewind the job to checkpoint 3, or one before"):
        is_due(Marker("uid", 3, ref(2, 7), ((0, 4),)), SLOT, target)


RECENT = (ref(3), ref(4), ref(5), ref(6), ref(7))


@pytest.mark.parametrize("target", [Target(ref(5, 7), True, is_first=True), Target(ref(20), is_first=True)])
def test_job_that_was_set_back_and_lost_the_published_checkpoint_is_known(target: Target) -> None:
    """It went on while the sink was away, and was rewound, or kept few checkpoints: its manifest still names them."""
    target = replace(target, marked_slots=4, published=3, recent=RECENT)
    lost = Marker("uid", 3, CheckpointRef(6, 0, "lost"))
    with pytest.raises(
        ConflictError, match=r"checkpoint 6.0.lost, which job 'job' does not have.*checkpoint 3, or one"
    ):
        is_due(lost, SLOT, target)
    assert is_due(Marker("uid", 3, ref(6)), SLOT, target)
    # What the error says to do: all output up to there is published, whatever came after it.
    assert is_due(lost, SLOT, Target(ref(3, 9), True, is_first=True, marked_slots=4, published=2, recent=RECENT))


def test_marker_beyond_the_end_of_a_branch_is_an_error() -> None:
    """No checkpoint came after the one that a rewind has set back from: the marker's was lost before."""
    target = Target(ref(5, 7), True, is_first=True, published=3, recent=RECENT, given_up_from=ref(7))
    lost = Marker("uid", 3, CheckpointRef(9, 0, "lost"))
    with pytest.raises(ConflictError, match=r"checkpoint 9.0.lost, which job 'job' does not have"):
        is_due(lost, SLOT, target)
    assert is_due(Marker("uid", 3, ref(7)), SLOT, target)
    assert is_due(lost, SLOT, replace(target, given_up_from=None))  # a rebuild: what it lost may be published
    assert is_due(lost, SLOT, replace(target, checkpoint=ref(3, 7)))


def test_marker_of_a_stored_checkpoint_is_the_jobs() -> None:
    """Not the uid of another branch's checkpoint counts; of those that are no longer stored nothing is known."""
    stored = (ref(1), ref(1, 7), ref(2, 7))
    for marker in (Marker("uid", 3, ref(1, 7)), Marker("uid", 3, ref(0, 7)), Marker("uid", 3, ref(2, 7))):
        assert is_due(marker, SLOT, Target(ref(2, 7), is_first=True, stored=stored)) is (marker.checkpoint.id < 2)


def test_slot_of_a_newer_driver_is_published() -> None:
    """A paused driver goes on after its successor has published more: its own checkpoints are among that."""
    sink = MemorySink(Marker("uid", 3, ref(2)))
    publish(sink, Target(ref(1)))
    publish(sink, Target(ref(2), is_first=True))
    assert sink.records == []


def test_system_that_was_set_back_before_a_rewind() -> None:
    """The rewind's target has no output from before it: what the system lost would never be published."""
    target = Target(ref(2, 7), starts_branch=True, marked_slots=4, published=1)
    first = Slot("job", "uid", "output", 0)
    with pytest.raises(ConflictError, match=r"had published more than checkpoint 0\..* Rewind the job to .* 0 "):
        is_due(Marker("uid", 0, ref(0)), first, target)
    assert is_due(Marker("uid", 0, ref(0, 5), ((0, 1),)), first, target)
    assert is_due(Marker("uid", 3, ref(0)), SLOT, target)  # it may have been out of use
    with pytest.raises(ConflictError, match="slot 3 of sink 'output' had published more than checkpoint 0"):
        is_due(Marker("uid", 3, ref(0)), SLOT, replace(target, used_slots=4))


def test_system_that_was_set_back_before_two_rewinds() -> None:
    """The marker knows nothing of the branch between: that branch's output is not taken for the former one's."""
    first, marker = Slot("job", "uid", "output", 0), Marker("uid", 0, ref(2))
    target = Target(ref(2, 9), True, marked_slots=1, published=1, stored=(ref(1, 7), ref(2, 9)))
    with pytest.raises(ConflictError, match=r"Rewind the job to checkpoint 1 or one before"):
        is_due(marker, first, target)
    assert is_due(Marker("uid", 0, ref(1, 7), ((0, 2),)), first, target)
    assert is_due(marker, SLOT, target)  # it may have been out of use
    assert is_due(marker, first, replace(target, stored=(ref(1), ref(2, 9))))
    assert is_due(marker, first, replace(target, used_slots=0))  # the sink has come back
    with pytest.raises(ConflictError, match=r"Rewind the job to checkpoint 1 or one before"):
        is_due(marker, first, Target(ref(2, 7), True, stored=(ref(1, 7), ref(2, 7))))  # it has more slots now


def test_system_that_was_set_back_over_several_rewinds() -> None:
    """
    After the advised rewind the marker is on a newer branch, and knows none of those between.

    Output of one of them would count as that of the branch before them, and the others' be taken for published.
    """
    first, marker = Slot("job", "uid", "output", 0), Marker("uid", 0, ref(0, 13), ((0, 0),))
    target = Target(ref(2, 16), True, marked_slots=4, published=0, stored=(ref(1, 7), ref(2, 16)))
    with pytest.raises(ConflictError, match=r"more than checkpoint 0\..* Rewind the job to checkpoint 0 "):
        is_due(marker, first, target)
    assert is_due(replace(marker, earlier=((0, 0), (7, 0))), first, target)
    # What is older than its oldest branch it may have forgotten, or the sink began there.
    assert is_due(replace(marker, earlier=((9, 0),)), first, replace(target, published=None))
    sink = MemorySink(replace(marker, slot=3))  # slot 3 was in use there only if the log has output of it
    with pytest.raises(ConflictError, match="slot 3 of sink 'output' had published more than checkpoint 0"):
        publish(sink, target, epochs=(7,))
    publish(sink, target, epochs=(1,))
    assert sink.records == [11, 12]


def test_what_another_branch_published_does_not_count_for_a_system_that_was_set_back() -> None:
    """The marker has a greater checkpoint of the branch before; of that of the target it has the beginning only."""
    first, target = Slot("job", "uid", "output", 0), Target(ref(2, 9), True, marked_slots=1, published=1)
    target = replace(target, stored=(ref(1, 7), ref(2, 9)))
    with pytest.raises(ConflictError, match="had published more than checkpoint 0"):
        is_due(Marker("uid", 0, ref(0, 7), ((0, 2),)), first, target)
    assert is_due(Marker("uid", 0, ref(1, 7), ((0, 0),)), first, target)


@pytest.mark.parametrize(("branch", "published"), [(7, None), (0, 1)])
def test_the_log_tells_which_slots_were_in_use(branch: int, published: int | None) -> None:
    """A slot that has output in the target's log was in use there, though no stored checkpoint says so."""
    target = Target(ref(2, 9), True, marked_slots=4, published=published, stored=(ref(1, branch), ref(2, 9)))
    for marked, is_set_back in ((ref(0), True), (ref(1, branch), False)):
        sink = MemorySink(Marker("uid", 3, marked))
        if is_set_back:
            with pytest.raises(ConflictError, match="slot 3 of sink 'output' had published more than checkpoint 0"):
                publish(sink, target, epochs=(7,))
        else:
            publish(sink, target, epochs=(7,))
        assert sink.records == ([] if is_set_back else [72])


def test_slot_that_went_out_of_use_is_not_forgotten() -> None:
    """No batch has output for it any more: what a system lost that was set back would be missed by nobody."""
    for published, found, other in ((ref(2), ref(2), ref(1)), (ref(2, 7), ref(5, 9), ref(2))):
        target = Target(ref(9, found.branch), marked_slots=1, published=8, former_slots=FormerSlots(4, published))
        marker = Marker("uid", 3, found, () if found.branch == published.branch else ((0, 5), (7, 2)))
        set_back = Marker("uid", 3, other)
        for again in (target, replace(target, starts_branch=True)):  # it stays out of use, or is used again
            assert is_due(marker, SLOT, again)
            with pytest.raises(ConflictError, match=rf"slot 3 .* more than .* to checkpoint {other.id} or one"):
                is_due(set_back, SLOT, again)
        with pytest.raises(ConflictError, match="slot 3 of sink 'output' has published, but its marker is gone"):
            is_due(None, SLOT, target)
        assert is_due(None, replace(SLOT, number=4), target)


@pytest.mark.parametrize("earlier", [(), ((0, 4),), ((0, 4), (12, 9))])
def test_marker_travels_as_text(earlier: tuple[tuple[int, int], ...]) -> None:
    """Sinks store one line of text."""
    marker = Marker("u-1", 3, ref(5, 20), earlier)
    assert Marker.parse(marker.to_text()) == marker


@pytest.mark.parametrize(
    "text",
    [
        *("", "u 1", "u 1 5.0.x 3", "u 1 5.0.x 1:2,", "u 1 5.0.x\n", "u 99999999 5.0.x"),
        pytest.param(f"u 1 5.0.x {'1:2,' * 600}1:2", id="long"),
    ],
)
def test_other_texts_are_no_markers(text: str) -> None:
    """A marker that cannot be read is an error, never a missing one."""
    with pytest.raises(InvalidInputError):
        Marker.parse(text)


def test_marker_of_many_rewinds_stays_short() -> None:
    """At most 1,000 characters, whatever happened."""
    marker = Marker("x" * 36, 32767, CheckpointRef(10**15, 10**15, "u" * 32))
    for branch in range(1, 60):
        marker = marker.following(CheckpointRef(10**12 + branch, (10**9 + branch) * BRANCH_GENERATIONS, "u" * 32))
    assert len(marker.to_text()) < 1000
    assert Marker.parse(marker.to_text()) == marker


def test_a_step_of_a_start_knows_the_newest_checkpoint() -> None:
    """A slot may be ahead of it, but not of the job's newest checkpoint, which was lost then."""
    step = Target(ref(1), is_first=True, stored=(ref(1), ref(2)))
    assert not is_due(Marker("uid", 3, ref(2)), SLOT, step)
    with pytest.raises(ConflictError, match=r"has published checkpoint 3\..*its newest one was 2\."):
        is_due(Marker("uid", 3, ref(3)), SLOT, step)
