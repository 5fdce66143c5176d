"""
A conformance kit for sinks: publishes through one as queries do, kills and suspends publishers, and reads what is seen.

It needs real processes, and a sink whose system runs. Each history uses a sink name of its own, so a system may be
used for any number of calls.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa

from backend_client.sinks.protocol import Marker, Sink, Slot
from dstl_service.wire import BRANCH_GENERATIONS, CheckpointRef
from storage.errors import FencedError, UnavailableError

ATOMIC = "records and marker are visible together, or neither is"
ONCE = "each record is seen once"
ORDER = "records of a slot are seen in the order in which they were published"
FENCED = "a publisher whose slot another one opened publishes nothing any more"
MARKER = "the marker of what was published last is found"
_LONG = tuple((10**17 + number, 10**17 + number) for number in range(20))
"""As many earlier branches as a marker has, with the longest names."""

_KILL_STEPS = ("opened", "between records", "all records read", "published")
_CHILD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise of the protocol that a sink did not keep, in which history, and what was seen."""

    promise: str
    history: str
    seen: str


@dataclass(frozen=True, slots=True)
class SinkKit:
    """
    What the kit needs of a sink.

    Args:
        sink: The sink, with its system running.
        columns: The columns of its records.
        batch: Returns the records that stand for these numbers, one each; it is sent to other processes.
        read: Returns the numbers of all records that a reader of committed data sees now.
        in_order: Whether `read` returns the records of a slot in the order in which a reader sees them.
    """

    sink: Sink
    columns: pa.Schema
    batch: Callable[[Sequence[int]], pa.RecordBatch]
    read: Callable[[], Sequence[int]]
    in_order: bool = True

    def run(self) -> list[BrokenPromise]:
        """Run all histories; return what was broken, nothing for a sink that keeps its promises."""
        histories: list[Callable[[_History], None]] = [
            _plain,
            _rewound,
            _other_slots,
            _records_that_fail,
            _older_publisher,
            _older_publisher_within_its_records,
            _older_publisher_without_records,
            _suspended,
            *(_killed(step) for step in _KILL_STEPS),
        ]
        broken: list[BrokenPromise] = []
        for number, history in enumerate(histories):
            made = _History(self, number, history.__doc__ or "", broken)
            self.sink.check(self.columns, made.slots)
            history(made)
        return broken


class _History:
    """One history: a sink name, numbers that no other history uses, and what it has found broken."""

    def __init__(self, kit: SinkKit, number: int, name: str, broken: list[BrokenPromise]) -> None:
        self.kit = kit
        self.name = name
        uid = uuid.uuid4().hex
        self.slots = [Slot("kit", uid, f"kit-{uid[:8]}", slot, kit.columns) for slot in (0, 1)]
        self._first = number * 1000 + int(uid[:6], 16) * 100_000
        self._broken = broken

    def numbers(self, *offsets: int) -> list[int]:
        """Return this history's own numbers."""
        return [self._first + offset for offset in offsets]

    def marker(self, checkpoint_id: int, slot: int = 0, branch: int = 0) -> Marker:
        """Return a slot's marker."""
        of = self.slots[slot]
        ref = CheckpointRef(checkpoint_id, branch * BRANCH_GENERATIONS, f"m{checkpoint_id}")
        return Marker(of.job_uid, slot, ref)

    def publish(self, marker: Marker, *batches: Sequence[int]) -> None:
        """Open a slot and publish."""
        publisher = self.kit.sink.open(self.slots[marker.slot])
        try:
            publisher.publish([self.kit.batch(self.numbers(*offsets)) for offsets in batches], marker)
        finally:
            publisher.close()

    def last(self, slot: int = 0) -> Marker | None:
        """Open a slot and return its marker."""
        publisher = self.kit.sink.open(self.slots[slot])
        try:
            return publisher.last_published()
        finally:
            publisher.close()

    def seen(self) -> list[int]:
        """Return the offsets of this history's numbers that a reader sees."""
        return [value - self._first for value in self.kit.read() if 0 <= value - self._first < 1000]

    def expect(self, promise: str, expected: object, seen: object) -> None:
        """Note a broken promise unless both are equal."""
        if expected != seen:
            self._broken.append(BrokenPromise(promise, self.name, f"expected {expected}, seen {seen}"))

    def expect_records(self, *offsets: int) -> None:
        """Compare what a reader sees."""
        seen = self.seen()
        self.expect(ONCE, sorted(offsets), sorted(seen))
        if self.kit.in_order and sorted(offsets) == sorted(seen):
            for slot in (0, 1):
                of_slot = [offset for offset in seen if offset % 2 == slot]
                self.expect(ORDER, sorted(of_slot), of_slot)

    def expect_fenced(self, publish: Callable[[], object]) -> None:
        """Note a broken promise unless the call raises `FencedError`."""
        try:
            publish()
        except FencedError:
            return
        self.expect(FENCED, "FencedError", "success")


def _plain(history: _History) -> None:
    """Two slots publish several checkpoints, one of them without records."""
    history.expect(MARKER, None, history.last())
    history.publish(history.marker(0), [0, 2], [4])
    history.publish(history.marker(0, slot=1), [1, 3])
    history.expect(MARKER, [history.marker(0), history.marker(0, slot=1)], [history.last(), history.last(1)])
    history.publish(history.marker(1))
    history.expect(MARKER, history.marker(1), history.last())
    history.publish(history.marker(2), [6])
    history.expect(MARKER, history.marker(2), history.last())
    history.expect_records(0, 2, 4, 1, 3, 6)


def _rewound(history: _History) -> None:
    """After a rewind the first marker of the new branch is found, though nothing was published with it."""
    history.publish(history.marker(5), [0])
    first = replace(history.marker(3, branch=9), earlier=_LONG)
    history.publish(first)
    history.expect(MARKER, first, history.last())
    history.publish(history.marker(4, branch=9), [2])
    history.expect_records(0, 2)


def _other_slots(history: _History) -> None:
    """Another sink of the job, and another job's sink of this name, have published nothing."""
    history.publish(history.marker(0), [0])
    own = history.slots[0]
    for other in (replace(own, sink=f"{own.sink}-other"), replace(own, job_uid=uuid.uuid4().hex)):
        history.kit.sink.check(history.kit.columns, [other])
        publisher = history.kit.sink.open(other)
        history.expect(MARKER, None, publisher.last_published())
        publisher.close()


def _records_that_fail(history: _History) -> None:
    """The log fails while records are read from it: nothing is visible, and a later try publishes all."""

    def records() -> Iterator[pa.RecordBatch]:
        yield history.kit.batch(history.numbers(0))
        raise UnavailableError("the log does not answer")

    publisher = history.kit.sink.open(history.slots[0])
    try:
        publisher.publish(records(), history.marker(0))
        history.expect(ATOMIC, "UnavailableError", "success")
    except UnavailableError:
        pass
    finally:
        publisher.close()
    history.expect_records()
    history.expect(MARKER, None, history.last())
    history.publish(history.marker(0), [0], [2])
    history.expect_records(0, 2)


def _older_publisher(history: _History) -> None:
    """A publisher that stood still goes on after a newer one has published."""
    older = history.kit.sink.open(history.slots[0])
    history.publish(history.marker(0), [0])
    batch = history.kit.batch(history.numbers(2))
    history.expect_fenced(lambda: older.publish([batch], history.marker(0)))
    older.close()
    history.expect_records(0)
    history.expect(MARKER, history.marker(0), history.last())


def _older_publisher_within_its_records(history: _History) -> None:
    """A newer publisher publishes while an older one is reading its records."""

    def records() -> Iterator[pa.RecordBatch]:
        yield history.kit.batch(history.numbers(2))
        history.publish(history.marker(0), [0])
        yield history.kit.batch(history.numbers(4))

    older = history.kit.sink.open(history.slots[0])
    history.expect_fenced(lambda: older.publish(records(), history.marker(0)))
    older.close()
    history.expect_records(0)


def _older_publisher_without_records(history: _History) -> None:
    """A publisher that stood still has only a marker to publish, after a newer one has published more."""
    history.publish(history.marker(0), [0])
    older = history.kit.sink.open(history.slots[0])
    history.publish(history.marker(2), [2])
    history.expect_fenced(lambda: older.publish([], history.marker(1)))
    older.close()
    history.expect(MARKER, history.marker(2), history.last())
    history.expect_records(0, 2)


def _suspended(history: _History) -> None:
    """A process is suspended within its records, and resumes after a newer publisher."""
    child = _start(history, "suspended")
    _wait_until_stopped(child)
    history.publish(history.marker(0), [10])
    assert child.pid is not None
    os.kill(child.pid, signal.SIGCONT)
    child.join(_CHILD_TIMEOUT_S)
    history.expect_records(10)
    history.expect(MARKER, history.marker(0), history.last())


def _killed(step: str) -> Callable[[_History], None]:
    def run(history: _History) -> None:
        child = _start(history, step)
        child.join(_CHILD_TIMEOUT_S)
        history.expect("the publisher can be killed", -signal.SIGKILL, child.exitcode)
        found = history.last()
        if found is None:
            history.expect(ATOMIC, [], history.seen())
            history.publish(history.marker(0), [0, 2], [4])
        history.expect(MARKER, history.marker(0), history.last())
        history.expect_records(0, 2, 4)

    run.__doc__ = f"A publisher is killed: {step}."
    return run


def _start(history: _History, step: str) -> BaseProcess:
    batches = [history.kit.batch(history.numbers(*offsets)) for offsets in ([0, 2], [4])]
    process = multiprocessing.get_context("spawn").Process(
        target=_publish_until, args=(history.kit.sink, history.slots[0], batches, history.marker(0), step)
    )
    process.start()
    return process


def _publish_until(sink: Sink, slot: Slot, batches: Sequence[pa.RecordBatch], marker: Marker, step: str) -> None:
    """Publish in a process of its own, which kills or suspends itself at a step."""

    def reach(name: str) -> None:
        if step == name:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == "suspended" and name == "between records":
            os.kill(os.getpid(), signal.SIGSTOP)

    def records() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 1:
                reach("between records")
            yield batch
        reach("all records read")

    publisher = sink.open(slot)
    reach("opened")
    publisher.publish(records(), marker)
    reach("published")


def _wait_until_stopped(child: BaseProcess) -> None:
    deadline = time.monotonic() + _CHILD_TIMEOUT_S
    while Path(f"/proc/{child.pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "T":
        if time.monotonic() > deadline:
            raise TimeoutError("the publisher did not get to its records")
        time.sleep(0.02)
