"""A history of `sink_kit`: its calls to a sink, and the promises that it finds broken."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot
from backend_client.testing.sink_steps import Publishing, SteppedPublishers
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.errors import FencedError, InvalidInputError, UnavailableError

ATOMIC = "records and marker are visible together, or neither is"
ONCE = "each record is seen once"
ORDER = "records of a slot are seen in the order in which they were published"
FENCED = "a publisher whose slot another one opened publishes nothing any more"
MARKER = "the marker of what was published last is found"
CHECK = "a check fences nobody, and changes nothing that was published"
APART = "slots are apart: none fences another one, or takes its records"
COUNT = "the number of published records is returned"
LAST = "the publisher that has opened a slot last is not fenced"
WORKS = "a call succeeds, unless another publisher has opened the slot"

CHILD_TIMEOUT_S = 120.0
_NUMBERS = 200_000
"""How many numbers a history has."""
FEW = 3
_SHOWN_CHARS_MAX = 300
_TRIES_MAX = 3
"""A busy system may be silent until a time-out in the place of its refusal."""


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise of the protocol that a sink did not keep, in which history, and what was seen."""

    promise: str
    history: str
    seen: str


@dataclass(frozen=True, slots=True)
class SinkUnderTest:
    """
    A sink, with all that the kit needs to know of it.

    Args:
        sink: The sink, with its system running.
        columns: The columns of its records.
        batch: Returns the records that stand for these numbers, one each; it is sent to other processes.
        read: Returns the numbers of all records that a reader of committed data sees now.
        in_order: Whether `read` returns the records of a slot in the order in which a reader sees them.
        keeps_equal: Whether a reader sees equal records beside each other, as no reader of rows with a key does.
    """

    sink: Sink
    columns: pa.Schema
    batch: Callable[[Sequence[int]], pa.RecordBatch]
    read: Callable[[], Sequence[int]]
    in_order: bool = True
    keeps_equal: bool = True


class History:
    """One history: a sink name, numbers that no other history uses, and what it has found broken."""

    def __init__(
        self, kit: SinkUnderTest, number: int, name: str, broken: list[BrokenPromise], publishers: SteppedPublishers
    ) -> None:
        self.kit = kit
        self.publishers = publishers
        self.name = name
        uid = uuid.uuid4().hex
        self.slots = [Slot("kit", uid, f"kit-{uid[:8]}", slot, kit.columns) for slot in (0, 1, 2)]
        self._first = number * _NUMBERS + int(uid[:6], 16) * 100 * _NUMBERS
        self._broken = broken

    def numbers(self, *offsets: int) -> list[int]:
        """Return this history's own numbers."""
        return [self._first + offset for offset in offsets]

    def marker(self, checkpoint_id: int, slot: int = 0, branch: int = 0) -> Marker:
        """Return a slot's marker."""
        of = self.slots[slot]
        ref = CheckpointRef(checkpoint_id, branch * BRANCH_GENERATIONS, f"m{checkpoint_id}")
        return Marker(of.job_uid, slot, ref)

    def publishing(self, number: int, size: int = FEW) -> Publishing:
        """Return a publisher's work for checkpoint `number`, one of many with `size` records each."""
        batches = [self.kit.batch(self.numbers(*offsets)) for offsets in _offsets(number, size)]
        return Publishing(self.kit.sink, self.slots[0], batches, self.marker(number))

    def published(self, number: int, size: int = FEW) -> list[int]:
        """Return the offsets of the records of all of these checkpoints before `number`."""
        return [offset for before in range(number) for offsets in _offsets(before, size) for offset in offsets]

    def complete(self, number: int, size: int = FEW) -> None:
        """Publish a checkpoint of these if it is not, as any publisher would."""
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if self.last() != self.marker(number):
                    self.publish(self.marker(number), *_offsets(number, size))
            except (FencedError, UnavailableError):
                continue
            except Exception as error:  # noqa: BLE001 - the sink is the user's
                self.note(error)
            return

    @property
    def is_broken(self) -> bool:
        """Whether this history has found a broken promise."""
        return any(item.history == self.name for item in self._broken)

    def publish(self, marker: Marker, *batches: Sequence[int]) -> None:
        """Open a slot and publish."""
        with closing(self.kit.sink.open(self.slots[marker.slot])) as publisher:
            count = publisher.publish([self.kit.batch(self.numbers(*offsets)) for offsets in batches], marker)
            self.expect(COUNT, sum(map(len, batches)), count)

    def last(self, slot: int = 0) -> Marker | None:
        """Open a slot and return its marker."""
        with closing(self.kit.sink.open(self.slots[slot])) as publisher:
            return publisher.last_published()

    def seen(self) -> list[int]:
        """Return the offsets of this history's numbers that a reader sees."""
        return [value - self._first for value in self.kit.read() if 0 <= value - self._first < _NUMBERS]

    def expect(self, promise: str, expected: object, seen: object) -> None:
        """Note a broken promise unless both are equal."""
        if expected != seen:
            found = f"expected {_short(expected)}, seen {_short(seen)}"
            self._broken.append(BrokenPromise(promise, self.name, found))

    def note(self, error: Exception) -> None:
        """Note the broken promise of a call that raised an error where it had to succeed."""
        promise = WORKS
        if isinstance(error, InvalidInputError):  # of a marker
            promise = MARKER
        if isinstance(error, FencedError):
            promise = LAST
        self.expect(promise, "success", _text_of(error))

    def expect_records(self, *offsets: int) -> None:
        """Compare what a reader sees."""
        seen = self.seen()
        self.expect(ONCE, sorted(offsets), sorted(seen))
        if self.kit.in_order and sorted(offsets) == sorted(seen):
            for slot in (0, 1):
                of_slot = [offset for offset in seen if offset % 2 == slot]
                self.expect(ORDER, sorted(of_slot), of_slot)

    def expect_success(self, promise: str, publish: Callable[[], object]) -> None:
        """Note a broken promise if the call raises an error, whichever it is."""
        try:
            publish()
        except Exception as error:  # noqa: BLE001 - the sink is the user's
            self.expect(promise, "success", _text_of(error))

    def expect_fenced(self, publish: Callable[[], object]) -> None:
        """Note a broken promise unless the call raises `FencedError`; it is repeated while the system is silent."""
        seen = "success"
        for _ in range(_TRIES_MAX):
            try:
                publish()
            except FencedError:
                return
            except UnavailableError as error:
                seen = _text_of(error)
                continue
            except Exception as error:  # noqa: BLE001 - the sink is the user's
                seen = _text_of(error)
            break
        self.expect(FENCED, "FencedError", seen)


def _text_of(error: Exception) -> str:
    """Return an error with its class, as a traceback ends."""
    return f"{type(error).__name__}: {error}"


def _short(found: object) -> str:
    text = str(found)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…"


def _offsets(number: int, size: int) -> tuple[list[int], list[int]]:
    """Return the records of one of many checkpoints in two batches; even numbers, as they are of slot 0."""
    first = 2 * size * number
    offsets = list(range(first, first + 2 * size, 2))
    return offsets[: -(size // 3)], offsets[-(size // 3) :]
