"""
The protocol of a sink to which output is published exactly once.

The records of a checkpoint lie in the changelog with the checkpoint: the log is the pre-commit. When the checkpoint
exists, its records are published in *slots*, a fixed number per sink: those of one slot in one atomic step, together
with a *marker* that names the checkpoint. After any crash the marker tells what is missing. So a sink needs no
coordinator, and any process may publish: opening a slot fences its former publishers; the new one reads the marker and
continues from there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import pyarrow as pa

from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError

_BRANCHES_MAX = 20
"""A rewind to a checkpoint of an older branch may publish again what that branch had published."""
MARKER_CHARS_MAX = 2_000
"""A longer text is no marker: the longest has 1,031. Whoever may write to the system may put any text in its place."""
_PAIR = "[0-9]{1,18}:[0-9]{1,18}"
_MARKER = re.compile(rf"([0-9A-Za-z_-]{{1,64}}) ([0-9]{{1,5}}) (\S{{1,200}})(?: ({_PAIR}(?:,{_PAIR})*))?")


@dataclass(frozen=True, slots=True)
class Slot:
    """
    One of the fixed parts in which a sink publishes; no two publishers of a slot can both succeed.

    Args:
        job: Name of the job.
        job_uid: Distinguishes the job from earlier and later jobs of its name.
        sink: Name of the sink within the job.
        number: Number of the slot, 0..32767.
        columns: The query's output columns; records of an earlier run, before it was changed, may have others.
    """

    job: str
    job_uid: str
    sink: str
    number: int
    columns: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class Marker:
    """
    Says that a slot has published its records of all checkpoints up to this one; to a sink it is a text.

    Checkpoint ids come again after a rewind, which begins a new *branch* of checkpoints. So a marker also says how far
    the slot had published on earlier branches: after a rewind to one of their checkpoints nothing is published twice.

    Args:
        job_uid: The job's uid.
        slot: Number of the slot.
        checkpoint: The newest checkpoint whose records are published.
        earlier: Each earlier branch's name and the id of its newest published checkpoint, oldest first.
    """

    job_uid: str
    slot: int
    checkpoint: CheckpointRef
    earlier: tuple[tuple[int, int], ...] = ()

    @classmethod
    def first(cls, job_uid: str, slot: int, checkpoint: CheckpointRef, records: Iterable[tuple[int, int]] = ()) -> Self:
        """
        Return the marker of a slot that has published nothing before.

        Args:
            job_uid: The job's uid.
            slot: Number of the slot.
            checkpoint: The newest checkpoint whose records are published.
            records: Epoch and checkpoint id of all records that are published with it, if a rewind began its branch.
                Those of earlier epochs are of the branch that the job began with: a slot that had published on any
                other would have a marker.
        """
        earlier = [checkpoint_id for epoch, checkpoint_id in records if epoch < checkpoint.branch]
        return cls(job_uid, slot, checkpoint, ((0, max(earlier)),) if earlier else ())

    @property
    def newest(self) -> int:
        """The greatest id of all published checkpoints, on whichever branch."""
        return max(published for _, published in self._branches)

    def knows(self, branch: int) -> bool:
        """Return whether the slot has published on a branch; true of those before the oldest that it remembers."""
        known = [of_marker for of_marker, _ in self._branches]
        return branch <= known[0] or branch in known

    def includes(self, checkpoint: CheckpointRef) -> bool:
        """Return whether the slot has published up to a checkpoint; true on branches before those it remembers."""
        published = dict(self._branches)
        return checkpoint.branch < min(published) or published.get(checkpoint.branch, -1) >= checkpoint.id

    def covers(self, epoch: int, checkpoint_id: int) -> bool:
        """Return whether records that a driver of this epoch logged for a checkpoint are published."""
        until = [published for branch, published in self._branches if branch <= epoch]
        return bool(until) and checkpoint_id <= until[-1]

    def following(self, checkpoint: CheckpointRef, records: Iterable[tuple[int, int]] = ()) -> Self:
        """
        Return the slot's marker when a later checkpoint is published.

        Args:
            checkpoint: The checkpoint; if it is of a newer branch, the first one of that.
            records: Epoch and checkpoint id of all records that are published with it, if it is of a newer branch. They
                are of earlier branches, each of which has then published all up to there.
        """
        if checkpoint.branch == self.checkpoint.branch:
            return replace(self, checkpoint=checkpoint)
        branches = dict(self._branches)
        for epoch, checkpoint_id in records:
            branch = max((branch for branch in branches if branch <= epoch), default=0)
            branches[branch] = max(branches.get(branch, -1), checkpoint_id)
        return replace(self, checkpoint=checkpoint, earlier=tuple(sorted(branches.items()))[-_BRANCHES_MAX:])

    @property
    def _branches(self) -> tuple[tuple[int, int], ...]:
        return (*self.earlier, (self.checkpoint.branch, self.checkpoint.id))

    def to_text(self) -> str:
        """Return the text that `parse` reads: at most 1,000 characters, ASCII, without quotes."""
        earlier = ",".join(f"{branch}:{published}" for branch, published in self.earlier)
        return f"{self.job_uid} {self.slot} {self.checkpoint.to_text()} {earlier}".rstrip()

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Read the result of `to_text`.

        Raises:
            InvalidInputError: The text has another form.
        """
        match = _MARKER.fullmatch(text) if len(text) <= MARKER_CHARS_MAX else None
        if match is None:
            raise InvalidInputError(f"{text[:100]!r} is not a marker; the form is <job uid> <slot> <checkpoint>")
        pairs = (pair.split(":") for pair in (match[4] or "").split(",") if pair)
        earlier = tuple((int(branch), int(published)) for branch, published in pairs)
        return cls(match[1], int(match[2]), CheckpointRef.parse(match[3]), earlier)


class SlotPublisher(ABC):
    """
    Publishes the records of one slot. Single-threaded.

    Every method may raise `UnavailableError` when the system does not answer or refuses for a reason outside this
    program, with a text that says what to do: it is called again until it succeeds. It raises `FencedError` when
    another publisher has opened the slot since: this one is of no use any more.
    """

    @abstractmethod
    def last_published(self) -> Marker | None:
        """Return the marker of the newest records that readers see or will see; None if the slot has published none."""

    @abstractmethod
    def publish(self, records: Iterable[pa.RecordBatch], marker: Marker) -> int:
        """
        Publish records and marker in one atomic step; return the number of records.

        Readers see either all of it or nothing, and records in the order given. If the response is lost, the caller
        opens the slot again, and `last_published` tells how it ended.

        Args:
            records: Batches of the query's output columns; may be empty, then only the marker is published. Lazy: each
                batch is read from the log when it is asked for.
            marker: Replaces the slot's marker.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. No reader sees records that were not published."""


class Sink(ABC):
    """
    A system to which output is published exactly once. Small and picklable: it is sent to the tasks.

    Args of subclasses are options; secrets among them must not appear in `repr`.
    """

    @abstractmethod
    def check(self, columns: pa.Schema, slots: Sequence[Slot]) -> None:
        """
        Check on the driver, before the query takes its job over, that the sink can be used.

        Args:
            columns: The query's output columns.
            slots: The slots in which it is going to publish.

        Raises:
            InvalidInputError: A column is missing or has the wrong type, or an option contradicts what the system
                allows; says both values.
            UnavailableError: The system cannot be reached.
        """

    @abstractmethod
    def open(self, slot: Slot) -> SlotPublisher:
        """
        Open a slot, and fence its former publishers: they can publish nothing any more.

        Raises:
            UnavailableError: The system does not answer, or refuses; says what to do.
        """
