"""
What a system must do so that output is published to it exactly once.

The records of a checkpoint lie in the changelog with the checkpoint: the log is the pre-commit. When the checkpoint
exists, its records are published in *slots*, a fixed number per sink: those of one slot in one atomic step, together
with a *marker* that names the checkpoint. After any crash the marker tells what is missing. So a sink needs no
coordinator, and it does not matter who publishes: whoever opens a slot fences those before, reads its marker, and
goes on from there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from dstl_service.wire import CheckpointRef
from storage.errors import InvalidInputError

_MARKER = re.compile(r"([0-9A-Za-z_-]{1,64}) ([0-9]{1,5}) (\S{1,200})")


@dataclass(frozen=True, slots=True)
class Slot:
    """
    One of the fixed parts in which a sink publishes; no two publishers of a slot can both succeed.

    Args:
        job: Name of the job.
        job_uid: Distinguishes the job from earlier and later jobs of its name.
        sink: Name of the sink within the job.
        number: Number of the slot, 0..32767.
    """

    job: str
    job_uid: str
    sink: str
    number: int


@dataclass(frozen=True, slots=True)
class Marker:
    """
    Says that a slot has published its records of all checkpoints up to this one.

    Args:
        job_uid: The job's uid.
        slot: Number of the slot.
        checkpoint: The checkpoint. Its manifest's uid and its branch distinguish it from a checkpoint of the same id
            that a rewind gave up.
    """

    job_uid: str
    slot: int
    checkpoint: CheckpointRef

    def to_text(self) -> str:
        """Return the text that `parse` reads: at most 300 characters, ASCII, without quotes."""
        return f"{self.job_uid} {self.slot} {self.checkpoint.to_text()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Read the result of `to_text`.

        Raises:
            InvalidInputError: The text has another form.
        """
        match = _MARKER.fullmatch(text)
        if match is None:
            raise InvalidInputError(f"{text[:100]!r} is not a marker; the form is <job uid> <slot> <checkpoint>")
        return cls(match[1], int(match[2]), CheckpointRef.parse(match[3]))


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
        """Release connections. What was not published is not seen by any reader."""


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
        Open a slot, and fence those who opened it before: they can publish nothing any more.

        Raises:
            UnavailableError: The system does not answer, or refuses; says what to do.
        """
