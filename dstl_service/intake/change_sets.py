"""
The change sets of a job that a service holds, and when they are uploaded.

The life of a set: *received* (in memory only, lost with the process) -> *requested* (a request waits, or a threshold
was passed) -> *uploading* -> *durable* (its handle can be given out, I5). A failed upload puts its sets back to
*received* (I7). Receiving the same set again changes nothing (I8). Held bytes are bounded (I9).

Invariants:
1. A set is in at most one batch at a time; a batch becomes one object, which exceeds the batch size by at most one set.
2. `in_flight_bytes` is the size of all sets that are not durable, plus those that a late attempt of an upload still
   holds in memory: durable ones, and ones forgotten meanwhile.
3. Only sets that were requested, or released by a threshold, are uploaded: most sets of attempts that Spark did not
   accept never reach the store.

No I/O, no clock: the caller passes the time.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dstl_service.intake.held_sets import HeldSets
from storage.errors import ConflictError, InvalidInputError, LostChangesError
from storage.model import ChangeSetId, Segment, SegmentHandle
from storage.segment_format import SEGMENTS_MAX


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """When change sets are uploaded, and how many bytes may wait."""

    delay_ms: int = 10
    """How long a preemptive set waits for others, so that they share an object."""
    size_bytes: int = 10 * 1024 * 1024
    """A batch of this size is uploaded at once."""
    in_flight_bytes_max: int = 100 * 1024 * 1024
    """Bytes received and not yet durable, over all jobs. One job holds at most two thirds of it, unless it has a single
    set. More is refused with back-pressure."""

    def __post_init__(self) -> None:
        if not 0 < self.size_bytes <= self.in_flight_bytes_max:
            raise InvalidInputError(
                f"batch size_bytes ({self.size_bytes}) must be positive and at most in_flight_bytes_max "
                f"({self.in_flight_bytes_max})"
            )
        if self.delay_ms < 0:
            raise InvalidInputError(f"batch delay_ms must not be negative: {self.delay_ms}")


class _Stage(enum.Enum):
    RECEIVED = "received"
    REQUESTED = "requested"
    UPLOADING = "uploading"
    DURABLE = "durable"


@dataclass(slots=True, eq=False)
class _Entry:
    segment: Segment
    stage: _Stage
    handle: SegmentHandle | None = None


class ChangeSetTracker:
    """
    The change sets of one job in one service. Not thread-safe: owned by the event loop.

    Args:
        settings: When change sets are uploaded.
        all_held: What all trackers hold.
    """

    def __init__(self, settings: BatchSettings, all_held: HeldSets | None = None) -> None:
        self._settings = settings
        self._entries: dict[ChangeSetId, _Entry] = {}
        # The sets of the first two stages: taking a batch must not scan all sets of a large checkpoint.
        self._received: OrderedDict[_Entry, None] = OrderedDict()
        self._requested: OrderedDict[_Entry, None] = OrderedDict()
        self._ids_of: dict[int, list[ChangeSetId]] = {}  # checkpoint id -> ids of all sets held for it
        self._uploads_of: dict[int, int] = {}  # id() of a segment -> batches whose attempts hold it
        self._due_ms: int | None = None
        self._waiting_bytes = 0
        self.in_memory = HeldSets(all_held)
        self._is_closed = False

    @property
    def in_flight_bytes(self) -> int:
        """See invariant 2."""
        return self.in_memory.in_flight_bytes

    @property
    def is_empty(self) -> bool:
        """Say whether no set is known, and no upload attempt holds one."""
        return not self._entries and not self._uploads_of

    @property
    def due_ms(self) -> int | None:
        """When the next batch must be taken; None if none was requested."""
        return self._due_ms

    @property
    def unstored(self) -> list[ChangeSetId]:
        """Ids of the sets that are not durable."""
        return [set_id for set_id, entry in self._entries.items() if entry.stage is not _Stage.DURABLE]

    @property
    def queued(self) -> int:
        """Number of sets that are neither durable nor being uploaded."""
        return sum(entry.stage in (_Stage.RECEIVED, _Stage.REQUESTED) for entry in self._entries.values())

    def receive(self, segment: Segment, now_ms: int, *, preemptive: bool) -> bool:
        """
        Take in a set; return False if it is held already.

        Raises:
            ConflictError: The set is held with other content: two writers use one identity. Nothing was taken in.
            LostChangesError: This was closed.
        """
        self._check_open(segment)
        known = self._entries.get(segment.id)
        if known is not None:
            if known.segment.checksum != segment.checksum:
                raise ConflictError(
                    f"change set {segment.id} was received before with different content", operator=segment.id.operator
                )
            return False
        entry = self._entries[segment.id] = _Entry(segment, _Stage.RECEIVED)
        self._received[entry] = None
        self._ids_of.setdefault(segment.id.checkpoint_id, []).append(segment.id)
        self._waiting_bytes += len(segment.payload)
        self.in_memory.add_bytes(len(segment.payload))
        self.in_memory.add_sets(1)
        if self._waiting_bytes >= self._settings.size_bytes:
            self.request_all(now_ms)
        elif preemptive:
            self.request([segment.id], now_ms, delay_ms=self._settings.delay_ms)
        return True

    def take_note(self, segment: Segment) -> ChangeSetId:
        """
        Take in a note, which the service itself adds to a checkpoint's sets; return the id to request it by.

        A note triggers no threshold: it must not cause the upload of sets of attempts that were not accepted. A note of
        an earlier try with the same id is kept too; the later note gets the next free sqn.

        Raises:
            LostChangesError: This was closed.
        """
        self._check_open(segment)
        while (known := self._entries.get(segment.id)) is not None:
            if known.segment.checksum == segment.checksum:
                return segment.id
            segment = replace(segment, id=replace(segment.id, sqn=segment.id.sqn + 1))
        self._entries[segment.id] = _Entry(segment, _Stage.RECEIVED)
        self._ids_of.setdefault(segment.id.checkpoint_id, []).append(segment.id)
        self._waiting_bytes += len(segment.payload)
        self.in_memory.add_bytes(len(segment.payload))
        self.in_memory.add_sets(1)
        return segment.id

    def size_of(self, set_id: ChangeSetId) -> int | None:
        """Return the payload's size of a held set in bytes; None if it is not held."""
        entry = self._entries.get(set_id)
        return None if entry is None else len(entry.segment.payload)

    def request(self, ids: Iterable[ChangeSetId], now_ms: int, *, delay_ms: int = 0) -> None:
        """
        Request the upload of these sets within `delay_ms`.

        Raises:
            LostChangesError: A set is not held, for example after a restart of the service. Nothing was requested.
        """
        entries = [self._known(set_id) for set_id in ids]
        for entry in entries:
            if entry.stage is _Stage.RECEIVED:
                self._put_into(_Stage.REQUESTED, entry)
        if any(entry.stage is _Stage.REQUESTED for entry in entries):
            due_ms = now_ms + delay_ms
            self._due_ms = due_ms if self._due_ms is None else min(self._due_ms, due_ms)

    def request_all(self, now_ms: int) -> None:
        """Request the upload of all received sets, due at once."""
        for entry in list(self._received):
            self._put_into(_Stage.REQUESTED, entry)
        self._due_ms = now_ms

    def take_batch(self, now_ms: int) -> list[Segment]:
        """
        Return the sets of the batch that is due, or an empty list; the sets count as uploading from now on.

        Call until the list is empty: sets that do not fit are due at once in the next batch. Pass each batch to
        `released` when no attempt to upload it runs any more.
        """
        if self._due_ms is None or self._due_ms > now_ms:
            return []
        self._due_ms = None
        batch: list[Segment] = []
        size_bytes = 0
        while self._requested:
            if size_bytes >= self._settings.size_bytes or len(batch) >= SEGMENTS_MAX:
                self._due_ms = now_ms
                break
            entry = next(iter(self._requested))
            self._put_into(_Stage.UPLOADING, entry)
            size_bytes += len(entry.segment.payload)
            batch.append(entry.segment)
            self._uploads_of[id(entry.segment)] = self._uploads_of.get(id(entry.segment), 0) + 1
        self._waiting_bytes -= size_bytes
        return batch

    def uploaded(self, handles: Sequence[SegmentHandle]) -> None:
        """
        Record that a batch is durable; it may have failed before, if a late attempt stored it after all.

        Sets that were forgotten meanwhile, or became durable in another batch, are ignored.
        """
        for handle in handles:
            entry = self._entries.get(handle.entry.id)
            if entry is None or entry.handle is not None or entry.segment.checksum != handle.entry.checksum:
                continue
            segment = entry.segment
            if entry.stage is not _Stage.UPLOADING:
                self._waiting_bytes -= len(segment.payload)
            self._put_into(_Stage.DURABLE, entry)
            entry.handle = handle
            # The store has the payload now; the checksum recognizes a repeated send.
            entry.segment = replace(segment, payload=b"")
            self._let_go(segment)

    def failed(self, batch: Sequence[Segment]) -> None:
        """Put the sets of a failed batch back; the next request or threshold uploads them again (I7)."""
        for segment in batch:
            entry = self._entries.get(segment.id)
            # A set that was forgotten and received again may be uploading in another batch, which did not fail.
            if entry is not None and entry.segment is segment and entry.stage is _Stage.UPLOADING:
                self._put_into(_Stage.RECEIVED, entry)
                self._waiting_bytes += len(segment.payload)

    def released(self, batch: Sequence[Segment]) -> None:
        """Record that no attempt holds the sets of a batch any more, whatever the outcome."""
        for segment in batch:
            uploads = self._uploads_of.pop(id(segment)) - 1
            if uploads > 0:
                self._uploads_of[id(segment)] = uploads
            else:
                self._let_go(segment)

    def handles(self, ids: Iterable[ChangeSetId]) -> list[SegmentHandle] | None:
        """Return the handles of these sets in order; None while one is not durable."""
        entries = [self._known(set_id) for set_id in ids]
        handles = [entry.handle for entry in entries if entry.handle is not None]
        return handles if len(handles) == len(entries) else None

    def held(self, ids: Iterable[ChangeSetId]) -> list[Segment] | None:
        """Return these sets; None if one is durable, as its payload is no longer held."""
        entries = [self._known(set_id) for set_id in ids]
        return None if any(entry.handle is not None for entry in entries) else [entry.segment for entry in entries]

    def is_durable(self, set_id: ChangeSetId) -> bool:
        """Say whether this set is durable; `LostChangesError` if it is not held."""
        return self._known(set_id).handle is not None

    def is_uploading(self, ids: Iterable[ChangeSetId]) -> bool:
        """Say whether one of these sets is uploading or requested."""
        return any(self._known(set_id).stage in (_Stage.UPLOADING, _Stage.REQUESTED) for set_id in ids)

    def forget_up_to(self, checkpoint_id: int) -> None:
        """Drop all sets of this and earlier checkpoints: they are durable, or no checkpoint will name them."""
        for older_id in [older_id for older_id in self._ids_of if older_id <= checkpoint_id]:
            self._forget(self._ids_of.pop(older_id))

    def forget_epochs_before(self, epoch: int) -> None:
        """Drop all sets of older epochs: no checkpoint can name them any more (I4)."""
        self._forget([set_id for set_id in self._entries if set_id.writer.epoch < epoch])
        self._ids_of.clear()  # or it would keep the ids of all epochs
        for set_id in self._entries:
            self._ids_of.setdefault(set_id.checkpoint_id, []).append(set_id)

    def close(self) -> None:
        """Drop all sets of a job that was deleted, and take in none any more; late attempts count until `released`."""
        self._is_closed = True
        self._ids_of.clear()
        self._forget(list(self._entries))

    def _check_open(self, segment: Segment) -> None:
        if self._is_closed:
            raise LostChangesError(f"job {segment.id.job!r} was deleted meanwhile", job=segment.id.job)

    def _forget(self, ids: Iterable[ChangeSetId]) -> None:
        for set_id in ids:
            entry = self._entries.pop(set_id)
            self.in_memory.add_sets(-1)
            if entry.stage in (_Stage.RECEIVED, _Stage.REQUESTED):
                self._waiting_bytes -= len(entry.segment.payload)
                self._received.pop(entry, None)
                self._requested.pop(entry, None)
            if entry.stage is not _Stage.DURABLE:
                self._let_go(entry.segment)

    def _put_into(self, stage: _Stage, entry: _Entry) -> None:
        self._received.pop(entry, None)
        self._requested.pop(entry, None)
        if stage is _Stage.RECEIVED:
            self._received[entry] = None
        elif stage is _Stage.REQUESTED:
            self._requested[entry] = None
        entry.stage = stage

    def _let_go(self, segment: Segment) -> None:
        """Stop counting a set's bytes if neither the tracker nor an attempt holds it."""
        entry = self._entries.get(segment.id)
        if id(segment) not in self._uploads_of and (entry is None or entry.segment is not segment):
            self.in_memory.add_bytes(-len(segment.payload))

    def _known(self, set_id: ChangeSetId) -> _Entry:
        entry = self._entries.get(set_id)
        if entry is None:
            raise LostChangesError(
                f"change set {set_id} is not held by this service: the service was restarted before the set became "
                "durable, or the checkpoint was aborted; the batch must be executed again",
                operator=set_id.operator,
                checkpoint_id=set_id.checkpoint_id,
            )
        return entry
