"""
The intake's handling of a checkpoint's note, where it differs from that of the sets that tasks sent.

A note, see `formats.checkpoint_record`, becomes durable with the sets of its checkpoint, in one of their objects. It
comes last in a request and its handle last in the answer; no metric, log line or cache includes it. Owned by the event
loop; notes are parsed in threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstl_service.formats.checkpoint_record import received_segment, sent_by_tasks
from dstl_service.intake.change_sets import ChangeSetTracker
from dstl_service.intake.handle_check import is_of_job
from dstl_service.process.job_threads import JobThreads
from dstl_service.wire import NOTE_CHARS_MAX
from storage.errors import InvalidInputError, OverloadedError
from storage.model import ChangeSetId, Segment, SegmentHandle

NOTES_MAX = 16
"""Notes of a job that may wait to be stored; each has up to some megabytes, and reserves no room."""

NOTES_AT_ONCE = 4
"""Notes that are parsed at once, at most half of them one job's: each takes ten times its size, up to 80 MB."""


class NoteReader:
    """Parses the notes in requests, which may have megabytes: on the event loop each would delay a hundred requests."""

    def __init__(self) -> None:
        self._threads = JobThreads(NOTES_AT_ONCE, "note")

    async def segment_of(self, job: str, text: str | None) -> Segment | None:
        """Return the segment of a note; None without one. `InvalidInputError` if it is not a note of this job."""
        return None if text is None else await self._threads.run(job, received_segment, job, text)

    def close(self) -> None:
        """Release the threads."""
        self._threads.close()


@dataclass(frozen=True, slots=True)
class Persisted:
    """
    Result of a request to make change sets durable.

    Args:
        handles: Handles of the sets, in the order of their references; none if the request did not wait for them.
        note: Handle of the note, if there was one.
    """

    handles: list[SegmentHandle]
    note: SegmentHandle | None = None

    @classmethod
    def of(cls, handles: Sequence[SegmentHandle], sets: int) -> Persisted:
        """Return the result for handles of this many sets, and of a note after them if there is one more."""
        return cls(list(handles[:sets]), handles[sets] if len(handles) > sets else None)

    @property
    def all_handles(self) -> list[SegmentHandle]:
        """The handles of the sets, then the note's."""
        return self.handles if self.note is None else [*self.handles, self.note]


@dataclass(frozen=True, slots=True)
class Batch:
    """
    Segments that are uploaded together.

    Args:
        segments: All of them.
        sent: Those that tasks sent; metrics, log lines and the cache include no others.
    """

    segments: list[Segment]
    sent: frozenset[ChangeSetId]

    @classmethod
    def of(cls, segments: list[Segment]) -> Batch:
        """Return the batch of these segments."""
        return cls(segments, frozenset(sent_by_tasks(segment.id for segment in segments)))

    @property
    def fields(self) -> dict[str, object]:
        """Log fields: job, newest checkpoint and epoch, attempts, and number of sets."""
        ids = [segment.id for segment in self.segments]
        return {
            "job": ids[0].job,
            "checkpoint_id": max(set_id.checkpoint_id for set_id in ids),
            "epoch": max(set_id.writer.epoch for set_id in ids),
            "attempts": sorted({set_id.writer.attempt for set_id in self.sent}),
            "change_sets": len(self.sent),
        }


def unstored_sets(tracker: ChangeSetTracker) -> int:
    """Return how many sets that tasks sent are not durable."""
    return len(sent_by_tasks(tracker.unstored))


def check_waiting(tracker: ChangeSetTracker, note: Segment | None) -> None:
    """Raise `OverloadedError` if too many notes of a job are held, or wait to be stored, to take this one in."""
    if note is not None:
        tracker.in_memory.check_room(note.id.job)
    if note is not None and len(tracker.unstored) - unstored_sets(tracker) >= NOTES_MAX:
        raise OverloadedError(f"{NOTES_MAX} notes of job {note.id.job!r} wait to be stored; retry later")


def is_stored_here(note: Segment | None, *, holds_sets: bool, others_do: bool) -> bool:
    """Decide whether this service stores a note: beside its own sets, or because the others cannot be sent it."""
    return holds_sets or not others_do or (note is not None and note.size_bytes > NOTE_CHARS_MAX)


def text_of(note: Segment | None) -> str | None:
    """Return a note as another service receives it."""
    return None if note is None else str(note.payload, "ascii")


def check_note_handle(job: str, note: Segment | None, handle: SegmentHandle) -> None:
    """Raise `InvalidInputError` if a peer's handle does not belong to the note; the sqn is the peer's choice."""
    if note is None:
        return
    sent, got = note.id, replace(handle.entry.id, sqn=note.id.sqn)
    if not is_of_job(job, handle) or sent != got or handle.entry.checksum != note.checksum:
        raise InvalidInputError(f"the handle in {handle.object_key[:200]!r} does not belong to the note that was sent")
