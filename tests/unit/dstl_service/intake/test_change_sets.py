"""The book of change sets: what is uploaded when, what is kept, and what is counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from dstl_service.intake.change_sets import BatchSettings, ChangeSetTracker
from dstl_service.intake.held_sets import HeldSets
from storage.errors import ConflictError, InvalidInputError, LostChangesError
from storage.model import Segment, Writer
from tests.unit.dstl_service.samples import handles_of, segment

SETTINGS = BatchSettings(delay_ms=10, size_bytes=100, in_flight_bytes_max=1000)


def book_of(*segments: Segment) -> ChangeSetTracker:
    """Return a book that received these sets at time 0."""
    book = ChangeSetTracker(SETTINGS)
    for one in segments:
        book.receive(one, 0, preemptive=False)
    return book


def uploaded(book: ChangeSetTracker, *segments: Segment) -> None:
    """Mark these sets as uploaded."""
    book.request([one.id for one in segments], 0)
    batch = book.take_batch(0)
    book.uploaded(handles_of(batch))
    book.released(batch)


def waiting_bytes(book: ChangeSetTracker) -> int:
    """Return how many bytes the book counts as waiting, from the size of the next set that becomes due at once."""
    assert book.take_batch(10**9) == []
    for added in range(SETTINGS.size_bytes):
        book.receive(segment(1_000 + added, payload=b"x"), 10**9, preemptive=False)
        if book.due_ms is not None:
            return SETTINGS.size_bytes - added - 1
    return SETTINGS.size_bytes - added - 2


class TestRelease:
    """When a set is uploaded."""

    def test_received_set_waits_for_request(self) -> None:
        """A set without a request is not uploaded, however long it waits."""
        book = book_of(segment())

        assert book.due_ms is None
        assert book.take_batch(10**9) == []

    def test_requested_set_is_due_at_once(self) -> None:
        """A request without a delay puts the set into the next batch."""
        book = book_of(segment())
        book.request([segment().id], 5)

        assert book.due_ms == 5
        assert book.take_batch(5) == [segment()]

    def test_only_requested_sets_are_taken(self) -> None:
        """A set of an attempt that Spark did not accept stays out of the batch of the others."""
        accepted, loser = segment(attempt=1), segment(attempt=2)
        book = book_of(accepted, loser)
        book.request([accepted.id], 0)

        assert book.take_batch(0) == [accepted]
        assert book.take_batch(10**9) == []

    def test_preemptive_set_waits_for_delay(self) -> None:
        """A preemptive set becomes due after the batch's delay, so that others can share its object."""
        book = ChangeSetTracker(SETTINGS)
        book.receive(segment(), 100, preemptive=True)

        assert book.due_ms == 110
        assert book.take_batch(109) == []
        assert book.take_batch(110) == [segment()]

    def test_earlier_request_moves_batch_forward(self) -> None:
        """The earliest of several requests decides when the batch is taken."""
        book = book_of(segment(0), segment(1))
        book.request([segment(0).id], 0, delay_ms=50)
        book.request([segment(1).id], 10, delay_ms=5)

        assert book.due_ms == 15
        assert len(book.take_batch(15)) == 2

    def test_later_request_delays_nothing(self) -> None:
        """A request with a longer delay does not postpone a batch that is due earlier."""
        book = book_of(segment(0), segment(1))
        book.request([segment(0).id], 0)
        book.request([segment(1).id], 0, delay_ms=50)

        assert book.due_ms == 0

    def test_full_batch_releases_all(self) -> None:
        """When the waiting bytes reach the batch's size, all waiting sets are uploaded without a request."""
        sets = [segment(sqn, b"x" * 40) for sqn in range(3)]
        book = book_of(*sets[:2])
        assert book.due_ms is None

        book.receive(sets[2], 7, preemptive=False)

        assert book.take_batch(7) == sets

    def test_much_that_waits_becomes_several_objects(self) -> None:
        """A batch ends with the set that reaches its size, so no object is larger than that and one set."""
        sets = [segment(sqn, b"x" * 40) for sqn in range(7)]
        book = book_of(*sets)

        batches = []
        while batch := book.take_batch(5):
            batches.append(batch)

        assert batches == [sets[:3], sets[3:6], sets[6:]]
        assert book.due_ms is None

    def test_taken_sets_fill_no_batch(self) -> None:
        """Sets being uploaded do not count towards the size of the next batch."""
        book = book_of(segment(0, b"x" * 90))
        book.request([segment(0).id], 0)
        book.take_batch(0)
        book.receive(segment(1, b"x" * 90), 0, preemptive=False)

        assert book.due_ms is None

    def test_set_is_in_one_batch_only(self) -> None:
        """A set being uploaded is not taken again, although it is requested again."""
        book = book_of(segment())
        book.request([segment().id], 0)
        assert book.take_batch(0)
        book.request([segment().id], 0)

        assert book.due_ms is None
        assert book.take_batch(10**9) == []

    def test_durable_set_is_not_uploaded_again(self) -> None:
        """Asking for a durable set starts nothing."""
        book = book_of(segment())
        uploaded(book, segment())
        book.request([segment().id], 0)

        assert book.due_ms is None


class TestOutcome:
    """The outcome of a batch."""

    def test_handles_come_in_order_asked(self) -> None:
        """Durable sets give their handles in the order of the request."""
        first, second = segment(0), segment(1)
        book = book_of(first, second)
        uploaded(book, first, second)

        handles = book.handles([second.id, first.id])

        assert handles is not None
        assert [handle.entry.id for handle in handles] == [second.id, first.id]

    def test_no_handles_while_one_waits(self) -> None:
        """The list of handles is returned only when all of its sets are durable (I5)."""
        book = book_of(segment(0), segment(1))
        uploaded(book, segment(0))

        assert book.handles([segment(0).id, segment(1).id]) is None

    @pytest.mark.parametrize(("step", "expected"), [("received", False), ("requested", True), ("taken", True)])
    def test_is_uploading_follows_stage(self, step: str, expected: bool) -> None:
        """A waiter learns whether there is an upload to wait for."""
        book = book_of(segment())
        if step != "received":
            book.request([segment().id], 0)
        if step == "taken":
            book.take_batch(0)

        assert book.is_uploading([segment().id]) is expected

    def test_failed_set_is_sent_again(self) -> None:
        """I7: a set whose upload failed is kept, and the next request uploads it again."""
        book = book_of(segment())
        book.request([segment().id], 0)
        batch = book.take_batch(0)
        book.failed(batch)
        book.released(batch)
        assert not book.is_uploading([segment().id])
        assert book.in_flight_bytes == 10

        uploaded(book, segment())

        assert book.handles([segment().id])
        assert book.in_flight_bytes == 0

    def test_failed_sets_count_for_threshold(self) -> None:
        """I7: failed sets wait again, so the next full batch takes them along."""
        book = book_of(segment(0, b"x" * 60))
        book.request([segment(0).id], 0)
        book.failed(book.take_batch(0))

        book.receive(segment(1, b"x" * 60), 0, preemptive=False)

        assert len(book.take_batch(0)) == 2

    def test_one_failure_fails_one_batch(self) -> None:
        """I7: sets of another batch are durable although a batch failed before them."""
        book = book_of(segment(0), segment(1))
        book.request([segment(0).id], 0)
        failing = book.take_batch(0)
        book.request([segment(1).id], 0)
        following = book.take_batch(0)
        book.failed(failing)
        book.uploaded(handles_of(following))

        assert book.handles([segment(1).id])
        assert book.handles([segment(0).id]) is None

    def test_durable_payload_is_let_go(self) -> None:
        """I9: a durable set keeps no bytes in memory, or a large checkpoint's preemptive sets would all stay."""

        class Payload(bytearray):
            """Bytes whose lifetime can be observed."""

        payload = Payload(b"0123456789")
        watched = weakref.ref(payload)
        book = ChangeSetTracker(SETTINGS)
        book.receive(segment(payload=payload), 0, preemptive=False)
        uploaded(book, segment())
        del payload
        gc.collect()

        assert watched() is None

    def test_late_attempt_makes_failed_set_durable(self) -> None:
        """I7: when an attempt succeeds after its upload was given up, its sets are durable and not sent again."""
        book = book_of(segment(payload=b"x" * 60))
        book.request([segment().id], 0)
        batch = book.take_batch(0)
        book.failed(batch)

        book.uploaded(handles_of(batch))
        book.released(batch)

        assert book.handles([segment().id])
        assert book.in_flight_bytes == 0
        book.receive(segment(1, b"x" * 60), 0, preemptive=False)
        assert book.due_ms is None

    @pytest.mark.parametrize("second", ["uploaded", "failed"])
    def test_set_in_two_uploads_is_durable_once(self, second: str) -> None:
        """I7: a late attempt of the first upload may win while the second one runs, whatever becomes of that."""
        book = book_of(segment())
        book.request([segment().id], 0)
        first = book.take_batch(0)
        book.failed(first)
        book.request([segment().id], 0)
        again = book.take_batch(0)

        book.uploaded(handles_of(first, "first"))
        if second == "uploaded":
            book.uploaded(handles_of(again, "second"))
        else:
            book.failed(again)
        handles = book.handles([segment().id])

        assert handles is not None
        assert [handle.object_key for handle in handles] == ["first"]
        assert book.in_flight_bytes == 10
        book.released(first)
        assert book.in_flight_bytes == 10
        book.released(again)
        assert book.in_flight_bytes == 0

    @pytest.mark.parametrize("ending", ["durable", "forgotten"])
    def test_bytes_of_hung_attempt_count(self, ending: str) -> None:
        """I9: bytes that a hung attempt holds in memory are in flight until it ends, needed or not."""
        book = book_of(segment())
        book.request([segment().id], 0)
        batch = book.take_batch(0)
        if ending == "durable":
            book.uploaded(handles_of(batch))
        else:
            book.forget_up_to(1)
        assert book.in_flight_bytes == 10

        book.released(batch)

        assert book.in_flight_bytes == 0

    @pytest.mark.parametrize("outcome", ["uploaded", "failed"])
    def test_outcome_of_forgotten_set_leaves_namesake_alone(self, outcome: str) -> None:
        """I2, I8: a forgotten set resent with other bytes is not confused with the one being uploaded."""
        old, new = segment(payload=b"old"), segment(payload=b"new")
        book = book_of(old)
        book.request([old.id], 0)
        batch = book.take_batch(0)
        book.forget_up_to(1)
        book.receive(new, 0, preemptive=False)
        book.request([new.id], 0)
        assert book.take_batch(0) == [new]
        if outcome == "uploaded":
            book.uploaded(handles_of(batch, "job/segments/host/old.seg"))
        else:
            book.failed(batch)
        book.released(batch)

        assert book.is_uploading([new.id])
        assert book.take_batch(0) == []
        assert book.handles([new.id]) is None

        (right,) = handles_of([new], "job/segments/host/new.seg")
        book.uploaded([right])
        assert book.handles([new.id]) == [right]
        book.released([new])
        assert book.in_flight_bytes == 0


class TestSameSetTwice:
    """Repeated requests."""

    @pytest.mark.parametrize("durable", [False, True])
    def test_same_set_is_taken_once(self, durable: bool) -> None:
        """I8: resending a set changes nothing, before and after it is durable."""
        book = book_of(segment())
        if durable:
            uploaded(book, segment())
        before = book.in_flight_bytes

        assert not book.receive(segment(), 0, preemptive=True)
        assert book.in_flight_bytes == before
        assert book.take_batch(10**9) == []

    def test_first_receipt_is_reported(self) -> None:
        """The first time, the set is received."""
        assert ChangeSetTracker(SETTINGS).receive(segment(), 0, preemptive=False)

    def test_other_content_is_refused(self) -> None:
        """I8: the same identity with other bytes is a conflict, and the first set stays."""
        book = book_of(segment(payload=b"one"))

        with pytest.raises(ConflictError):
            book.receive(segment(payload=b"other"), 0, preemptive=False)

        book.request([segment().id], 0)
        assert book.take_batch(0) == [segment(payload=b"one")]
        assert book.in_flight_bytes == 3


class TestForgetting:
    """Sets of finished checkpoints."""

    @pytest.mark.parametrize("stage", ["received", "requested", "uploading", "failed", "durable"])
    def test_forgotten_set_leaves_no_bytes(self, stage: str) -> None:
        """I9: whatever stage a set is in when it is forgotten, its bytes are counted no longer."""
        book = book_of(segment())
        if stage != "received":
            book.request([segment().id], 0)
        batch = book.take_batch(0) if stage in ("uploading", "failed", "durable") else []
        if stage == "failed":
            book.failed(batch)
        if stage == "durable":
            book.uploaded(handles_of(batch))
        if stage in ("failed", "durable"):
            book.released(batch)

        book.forget_up_to(1)
        if stage == "uploading":
            book.released(batch)

        assert book.in_flight_bytes == 0
        assert waiting_bytes(book) == 0

    @pytest.mark.parametrize("is_stored", [True, False])
    def test_note_is_forgotten_with_its_checkpoint(self, is_stored: bool) -> None:
        """A note is forgotten with its checkpoint's sets: the number of a job's checkpoints has no bound."""
        book = book_of(segment())
        note = book.take_note(segment(9))
        if is_stored:
            book.request([segment().id, note], 0)
            batch = book.take_batch(0)
            book.uploaded(handles_of(batch))
            book.released(batch)

        book.forget_up_to(1)

        assert book.size_of(note) is None
        assert book.in_flight_bytes == 0
        assert waiting_bytes(book) == 0

    @pytest.mark.parametrize("outcome", ["uploaded", "failed"])
    def test_late_outcome_is_ignored(self, outcome: str) -> None:
        """The end of an upload does not bring back sets that were forgotten meanwhile."""
        book = book_of(segment())
        book.request([segment().id], 0)
        batch = book.take_batch(0)
        book.forget_up_to(1)
        if outcome == "uploaded":
            book.uploaded(handles_of(batch))
        else:
            book.failed(batch)
        book.released(batch)

        assert book.size_of(segment().id) is None
        assert book.in_flight_bytes == 0
        assert waiting_bytes(book) == 0

    def test_later_checkpoints_are_kept(self) -> None:
        """Only sets up to the checkpoint are forgotten."""
        old, new = segment(checkpoint_id=1), segment(checkpoint_id=2)
        book = book_of(old, new)

        book.forget_up_to(1)
        uploaded(book, new)

        assert book.handles([new.id])

    @pytest.mark.parametrize("ask", ["request", "handles", "is_uploading"])
    def test_forgotten_set_is_reported_lost(self, ask: str) -> None:
        """A request for a set that is not here is told that the batch must be executed again."""
        book = book_of(segment())
        book.forget_up_to(1)

        with pytest.raises(LostChangesError, match="executed again"):
            book.request([segment().id], 0) if ask == "request" else getattr(book, ask)([segment().id])

    def test_lost_set_requests_nothing(self) -> None:
        """A request that names a lost set does not change the others."""
        book = book_of(segment(0))

        with pytest.raises(LostChangesError):
            book.request([segment(0).id, segment(1).id], 0)

        assert book.due_ms is None


class TestEpochs:
    """The sets of older epochs that a newer one leaves."""

    def test_older_epochs_are_forgotten(self) -> None:
        """I4: sets of an older epoch are neither held nor uploaded nor counted, and their checkpoint may still end."""
        waiting, durable = segment(0), segment(1)
        book = book_of(waiting, durable)
        uploaded(book, durable)
        book.request([waiting.id], 0)
        book.forget_epochs_before(4)

        assert (book.take_batch(10), book.in_flight_bytes, book.unstored) == ([], 0, [])
        with pytest.raises(LostChangesError):
            book.is_durable(durable.id)
        with pytest.raises(LostChangesError):
            book.handles([durable.id])
        book.forget_up_to(1)
        assert book.size_of(waiting.id) is None

    def test_sets_of_newer_epochs_stay(self) -> None:
        """I4, I9: only sets of older epochs free their room."""
        old = segment(payload=b"old")
        newer = replace(old, id=replace(old.id, writer=Writer(4, 7)), payload=b"newer")
        book = book_of(old, newer)
        book.forget_epochs_before(4)

        assert (book.size_of(newer.id), book.in_flight_bytes) == (len(b"newer"), len(b"newer"))
        with pytest.raises(LostChangesError):
            book.handles([old.id])

    def test_forgotten_set_may_come_again(self) -> None:
        """A set that was forgotten with its checkpoint and is resent is a new set, uploaded once."""
        book = book_of(segment())
        book.forget_up_to(1)
        again = segment()
        book.receive(again, 0, preemptive=False)
        book.request([again.id], 0)

        assert (book.take_batch(0), book.take_batch(0)) == ([again], [])
        book.forget_up_to(1)
        book.released([again])
        assert book.in_flight_bytes == 0

    def test_large_request_leaves_in_order(self) -> None:
        """Requested sets are uploaded in the order of the requests, in full batches, and each set once."""
        segments = [segment(sqn) for sqn in range(35)]
        book = ChangeSetTracker(BatchSettings(size_bytes=100, in_flight_bytes_max=1000))
        batches = []
        for one in segments:
            book.receive(one, 0, preemptive=True)
        while batch := book.take_batch(10):
            batches.append(batch)

        assert [len(batch) for batch in batches] == [10, 10, 10, 5]
        assert [one for batch in batches for one in batch] == segments


class TestSettings:
    """Relations between settings."""

    @pytest.mark.parametrize(
        "values",
        [
            {"size_bytes": 0},
            {"size_bytes": 101, "in_flight_bytes_max": 100},
            {"delay_ms": -1},
        ],
    )
    def test_impossible_settings_are_refused(self, values: dict[str, int]) -> None:
        """Relations between settings are checked when they are made."""
        with pytest.raises(InvalidInputError):
            BatchSettings(**values)


class TestTotal:
    """Counts over all jobs."""

    def test_total_is_the_sum_of_all_books(self) -> None:
        """I9: whatever happens to a set, the total changes with the count of its job."""
        total = HeldSets()
        one, other = ChangeSetTracker(SETTINGS, total), ChangeSetTracker(SETTINGS, total)
        seen = []
        for number, book in enumerate((one, other)):
            for partition in range(3):
                book.receive(segment(partition=partition, checkpoint_id=number), 0, preemptive=False)
        other.take_note(segment(operator="_note"))
        one.request([segment(partition=1, checkpoint_id=0).id], 0)
        batch = one.take_batch(0)
        steps: tuple[Callable[[], object], ...] = (
            lambda: one.forget_up_to(0),
            lambda: one.released(batch),
            lambda: other.forget_epochs_before(4),
        )
        for step in steps:
            seen.append(total.in_flight_bytes)
            assert total.in_flight_bytes == one.in_flight_bytes + other.in_flight_bytes
            step()
        assert [*seen, total.in_flight_bytes] == [70, 50, 40, 0]

    def test_closed_book_holds_what_late_attempts_hold(self) -> None:
        """I9: of a deleted job's sets only those held by an attempt count, and no other set is received."""
        total = HeldSets()
        book = ChangeSetTracker(SETTINGS, total)
        for partition in range(3):
            book.receive(segment(partition=partition), 0, preemptive=False)
        book.request([segment().id], 0)
        batch = book.take_batch(0)

        book.close()
        for take in (book.take_note, lambda late: book.receive(late, 0, preemptive=False)):
            with pytest.raises(LostChangesError, match="deleted"):
                take(segment(7))
        assert total.in_flight_bytes == len(batch[0].payload)
        book.failed(batch)
        book.released(batch)
        assert total.in_flight_bytes == book.in_flight_bytes == 0
