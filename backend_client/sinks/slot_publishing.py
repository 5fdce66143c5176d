"""
Publishes one slot up to a checkpoint: reads its marker, and publishes what the log has after it.

Any process may do this. A checkpoint that exists is given up by a rewind only, its output is in the log, and the sink
lets one publisher win; so a driver that was replaced, or a second attempt of a task, publishes the same as the newer
one. Only a publisher from before a rewind must not continue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot
from dstl_service.wire import CheckpointRef, FormerSlots
from storage.errors import ConflictError, FencedError


class LoggedRecords(NamedTuple):
    """Records of one change set: the epoch of the driver that logged it, its checkpoint's id, and its batches."""

    epoch: int
    checkpoint_id: int
    batches: Iterator[pa.RecordBatch]


ReadOutput: TypeAlias = Callable[[CheckpointRef | None], Iterator[LoggedRecords]]
"""
Reads a slot's output in the log up to the target, in order; each call reads it again.

The argument is a checkpoint of the target's branch after which to begin; None: read all that the log has.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """
    The target of a publish.

    Args:
        checkpoint: The newest checkpoint whose output is published.
        starts_branch: Whether slots may stand on an earlier branch: the job was rewound to this checkpoint, or has not
            used a slot since a rewind. Before anything is built on it, all slots are published up to it, even if that
            adds nothing but the marker.
        given_up: Output up to this checkpoint is not published any more.
        newest: A later checkpoint of the same branch, whose log has the output too when the first one is subsumed.
        marked_slots: Slots below this number have published before, and so have a marker.
        published: Those slots have published up to this checkpoint; None if that is not known.
        is_first: Whether its driver has had nothing published before: the job had no later checkpoint at that time.
        stored: The job's newest checkpoint and its predecessors, as far as they are stored, and the last predecessor in
            any case if slots may stand on an earlier branch; only of what a driver's start has published.
        used_slots: Slots below this number were in use at a rewind's target; others may have been so after it only.
        recent: The newest checkpoint known to be published and all later ones of the job, also those that rewinds gave
            up, oldest first; only of a driver's first target, and maybe not all.
        former_slots: Slots that once were in use, and may be again; only of what a driver's start has published.
        given_up_from: If the job was rewound to this checkpoint: the newest one before, if it is known to be that.
    """

    checkpoint: CheckpointRef
    starts_branch: bool = False
    given_up: int | None = None
    newest: CheckpointRef | None = None
    marked_slots: int = 0
    published: int | None = None
    is_first: bool = False
    stored: tuple[CheckpointRef, ...] = ()
    used_slots: int = 1
    recent: tuple[CheckpointRef, ...] = ()
    given_up_from: CheckpointRef | None = None
    former_slots: FormerSlots | None = None

    def has_marker(self, slot: Slot) -> bool:
        """Return whether a slot is known to have published."""
        known = 0 if self.former_slots is None else self.former_slots.number
        return slot.number < max(self.marked_slots, known)

    def was_left_before(self, slot: Slot, marker: Marker) -> bool:
        """Return whether a slot had published more than its marker says, when some slots went out of use."""
        former = self.former_slots
        return former is not None and slot.number < former.number and not marker.includes(former.published)

    def is_set_back_before(self, slot: Slot, marker: Marker) -> bool:
        """Return whether a slot's marker of an earlier branch says less than the slot has published to here."""
        if slot.number >= self.marked_slots or self.published is None:
            return False
        # Output published after the previous checkpoint's branch had begun was published on that branch; a rewind since
        # then has not altered it. Other branches may have published more.
        before = [known.branch for known in self.stored if known.id == self.checkpoint.id - 1]
        return not marker.covers(before[-1], self.published) if before else marker.newest < self.published

    def is_set_back(self, slot: Slot, after: int | None) -> bool:
        """Return whether a slot has published more than its marker, at checkpoint `after`, says: it was set back."""
        is_known = slot.number < self.marked_slots and self.published is not None
        return is_known and after is not None and after < (self.published or 0)


def is_due(marker: Marker | None, slot: Slot, target: Target) -> bool:
    """
    Return whether a slot has something to publish, if only a marker.

    Raises:
        FencedError: The job was rewound since; what follows the target is published by a newer driver.
        ConflictError: The marker is of another job, or was lost, or the slot was left out after a rewind; or the job
            lost the marker's checkpoint.
    """
    if marker is None:
        if target.has_marker(slot):
            raise ConflictError(
                f"slot {slot.number} of sink {slot.sink!r} has published, but its marker is gone: output that the log "
                "still has would be published twice. Restore the markers, or point the sink to the system that it had; "
                "for another system, or to continue without them, give the sink another name"
            )
        return True
    if marker.job_uid != slot.job_uid:
        raise ConflictError(
            f"slot {slot.number} of sink {slot.sink!r} has the marker of another job ({marker.job_uid}): give each job "
            "its own sink name"
        )
    of_marker, of_target = marker.checkpoint.branch, target.checkpoint.branch
    if of_marker > of_target:
        raise FencedError(
            f"job {slot.job!r} was rewound by epoch {of_marker}: output of checkpoint {target.checkpoint.id} from "
            f"before that is no longer published. If no newer driver runs, its storage was set back: {_advice(target)}",
            epoch=of_target,
            newer_epoch=of_marker,
        )
    _check_known(marker.checkpoint, slot, target)
    if target.was_left_before(slot, marker):
        raise _set_back(marker, slot, target)
    if of_marker == of_target:
        return marker.checkpoint.id < target.checkpoint.id
    _check_not_set_back(marker, slot, target)
    return True


def _check_not_set_back(marker: Marker, slot: Slot, target: Target) -> None:
    """
    Raise `ConflictError` if a slot has published more than its marker on an earlier branch says.

    A branch of which the marker does not know would be taken for a part of the one before: all slots are published to
    where a branch begins, before anything is built on it.
    """
    until = _until(marker, target)
    if not target.starts_branch:
        raise ConflictError(
            f"slot {slot.number} of sink {slot.sink!r} stands at a checkpoint that job {slot.job!r} gave up by a "
            "rewind, and was not published after it: its marker was set back or is not this job's. "
            f"{_advice_until(until)}"
        )
    # The number of marked slots is the greatest of before and after the rewind.
    is_known = marker.knows(_newest_branch(target))
    if slot.number < target.used_slots and (not is_known or target.is_set_back_before(slot, marker)):
        raise _set_back(marker, slot, target)


def _check_log(marker: Marker, slot: Slot, target: Target, logged: Sequence[tuple[int, int]]) -> None:
    """Raise `ConflictError` likewise if the log of a rewind's target shows that the slot was in use before that."""
    newest, published = _newest_branch(target), target.published
    is_left_out = not marker.knows(newest) and any(epoch >= newest for epoch, _ in logged)
    is_later = published is not None and any(checkpoint_id > published for _, checkpoint_id in logged)
    if is_left_out or (is_later and target.is_set_back_before(slot, marker)):
        raise _set_back(marker, slot, target)


def _newest_branch(target: Target) -> int:
    """Return the newest branch on which there is a stored predecessor of a target, and so a start; -1 if none is."""
    return max((known.branch for known in target.stored if known != target.checkpoint), default=-1)


def _until(marker: Marker, target: Target) -> int:
    after = (known.id for known in target.stored if not marker.knows(known.branch))
    return min([marker.newest, *after])


def _advice_until(until: int) -> str:
    return f"Rewind the job to checkpoint {until} or one before, or give the sink another name to continue without it"


def _set_back(marker: Marker, slot: Slot, target: Target) -> ConflictError:
    return ConflictError(
        f"slot {slot.number} of sink {slot.sink!r} had published more than checkpoint "
        f"{marker.checkpoint.to_text()}, where it stands: its system was set back, and the log of checkpoint "
        f"{target.checkpoint.to_text()} does not have the missing output. {_advice_until(_until(marker, target))}"
    )


def _check_known(published: CheckpointRef, slot: Slot, target: Target) -> None:
    """
    Raise `ConflictError` if the job lost the checkpoint that a slot has published.

    Its id comes again, and the new output under it would be taken for published. Later, a slot that is ahead of the
    target was published by a newer driver.
    """
    end = target.given_up_from
    of_branch = (known for known in (target.checkpoint, *target.stored) if known.branch == target.checkpoint.branch)
    newest = max(of_branch, key=lambda known: known.id)
    # Up to the first one all output is published, also if later ones were lost: a rewind to there gives nothing up.
    settled = min((known.id for known in target.recent), default=newest.id)
    recent = target.recent if newest.id > settled else ()
    is_replaced = any(
        published.id == known.id and published.branch == known.branch and published.uid != known.uid
        for known in (newest, *target.stored, *recent)
    )
    is_ahead = target.is_first and published.branch == newest.branch and published.id > newest.id
    if recent and end is not None:
        is_ahead |= published.branch == end.branch and published.id > end.id
    if is_replaced or is_ahead:
        raise ConflictError(
            f"slot {slot.number} of sink {slot.sink!r} has published checkpoint {published.to_text()}, which job "
            f"{slot.job!r} does not have: its newest one was {newest.to_text()}. Its storage was set back or lost "
            f"objects, or a newer driver runs. {_advice(target)}; or give the sink another name to go on from here"
        )


def _advice(target: Target) -> str:
    """Batches may have gone on since the loss: a rewind that left one would have its output taken for published."""
    is_known = target.published is not None
    until = f"checkpoint {target.published}, or one before" if is_known else "a checkpoint from before that"
    return f"Rewind the job to {until}, after which output is computed and published again"


def publish_slot(sink: Sink, slot: Slot, read: ReadOutput, target: Target) -> int:
    """
    Publish a slot up to the target; return the number of records, 0 if they were published before.

    Raises:
        FencedError: Another publisher has opened the slot since, or the job was rewound.
        UnavailableError: The sink or the log does not answer; nothing is lost, repeat it.
        ConflictError: The slot's marker does not fit the job.
    """
    with closing(sink.open(slot)) as publisher:
        last = publisher.last_published()
        if not is_due(last, slot, target):
            return 0
        branch = target.checkpoint.branch
        if last is not None and last.checkpoint.branch == branch:
            new = _wanted(read(last.checkpoint), last, target)
            return publisher.publish(_records(new), last.following(target.checkpoint))
        # On the branch that the job began with, there is no earlier one to tell of.
        found = []
        if branch > 0:
            logged = [item._replace(batches=iter(())) for item in read(None)]
            if last is not None:
                _check_log(last, slot, target, [(item.epoch, item.checkpoint_id) for item in logged])
            found = [(item.epoch, item.checkpoint_id) for item in _wanted(logged, last, target)]
        if last is None:
            marker = Marker.first(slot.job_uid, slot.number, target.checkpoint, found)
        else:
            marker = last.following(target.checkpoint, found)
        return publisher.publish(_records(_wanted(read(None), last, target)), marker)


def _wanted(logged: Iterable[LoggedRecords], marker: Marker | None, target: Target) -> Iterator[LoggedRecords]:
    """Yield what is neither published nor given up."""
    for item in logged:
        is_published = marker is not None and marker.covers(item.epoch, item.checkpoint_id)
        if not is_published and (target.given_up is None or item.checkpoint_id > target.given_up):
            yield item


def _records(logged: Iterable[LoggedRecords]) -> Iterator[pa.RecordBatch]:
    return chain.from_iterable(item.batches for item in logged)
