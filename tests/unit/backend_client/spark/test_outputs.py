"""The checkpoints that a sink's output publishes when a query starts, and the batches that wait for earlier ones."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from backend_client.settings import BackendSettings
from backend_client.sinks.parquet import ParquetSink
from backend_client.sinks.protocol import Slot, SlotPublisher
from backend_client.sinks.slot_publishing import Target
from backend_client.spark.output import outputs, tasks
from backend_client.spark.output.outputs import SinkOutput, SinkPlan
from backend_client.spark.output.publisher import BacklogLimits, Publisher
from backend_client.spark.shipping import Parcel
from dstl_service.wire import SINK, CheckpointInfo, CheckpointRef, FormerSlots, OperatorInfo
from storage.errors import InvalidInputError, UnavailableError
from tests.unit.backend_client.sinks.test_slot_publishing import MemorySink

FIRST, LAST = OperatorInfo("first", 4, "{}", {}), OperatorInfo("last", 4, "{}", {}, called="renamed")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch has waited until everything before it was published."""
    found: list[bool] = []
    monkeypatch.setattr(Publisher, "wait_for_room", lambda _, *, until_empty=False: found.append(until_empty))
    return found


def output(*operators: OperatorInfo) -> SinkOutput:
    """Return the output of a query whose newest checkpoint has these operators."""
    nothing: Any = None
    latest = CheckpointInfo(CheckpointRef(9, 0, "m"), None, 1, 0, "q", "", list(operators), 0, 0)
    session: Any = SimpleNamespace(latest=latest if operators else None, check_owned=lambda: None)
    shipments: Any = SimpleNamespace(parcel=lambda sink: sink)
    plan = SinkPlan(ParquetSink("file:///tmp/out"), "out", 2, StructType())
    return SinkOutput(plan, nothing, session, shipments, nothing)


@pytest.mark.parametrize(
    ("stored", "last", "must_wait"),
    [
        ((), LAST, False),
        ((FIRST, LAST), LAST, False),
        ((FIRST, LAST), OperatorInfo("last", 5, "{}", {}), True),
        ((FIRST, LAST), FIRST, True),
        ((FIRST,), LAST, True),
    ],
)
def test_batch_waits_where_keys_move(
    waits: list[bool], stored: tuple[OperatorInfo, ...], last: OperatorInfo, must_wait: bool
) -> None:
    """
    Keys move to other slots with another parallelism, and with another last operator.

    What a crash leaves is published by slots side by side, so keys must have one slot in all of it.
    """
    made = output(*stored)
    for _ in range(2):
        made.before_batch(last)
    assert waits == [must_wait, False]


REFS = [CheckpointRef(8, 0, "m8"), CheckpointRef(9, 0, "m9")]
STORED = OperatorInfo("output", 2, "MemorySink", {}, kind=SINK, published=7)


class Session:
    """A job with two stored checkpoints."""

    latest = CheckpointInfo(REFS[1], REFS[0], 1, 0, "q", "", [STORED], 0, 0)

    def stored(self) -> list[CheckpointInfo]:
        """Return them."""
        return [replace(self.latest, ref=REFS[0], base=None), self.latest]

    def check_owned(self) -> None:
        """Do nothing."""


class Shipments:
    """Sends nothing."""

    def parcel(self, value: object) -> object:
        """Return the value."""
        return value


def test_first_target_has_the_checkpoints_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """By them a marker of a checkpoint that the job lost is known as such."""
    submitted: list[tuple[Target, int]] = []

    class Publisher:
        def __init__(self, *_: object) -> None:
            pass

        def submit(self, target: Target, size_bytes: int) -> None:
            submitted.append((target, size_bytes))

    monkeypatch.setattr(outputs, "Publisher", Publisher)
    parts: Any = (Session(), Shipments(), None)
    SinkOutput(SinkPlan(MemorySink(), "output", 2, StructType()), BackendSettings("file:///s", "job"), *parts).start()
    expected = Target(REFS[1], marked_slots=2, published=7, stored=tuple(REFS), used_slots=2)
    assert submitted == [(replace(expected, checkpoint=ref), 0) for ref in REFS]


@pytest.mark.parametrize(
    ("slots", "former", "published", "kept"),
    [
        (2, None, 2, None),
        (1, None, 2, FormerSlots(2, REFS[1])),
        (2, FormerSlots(4, REFS[0]), 4, FormerSlots(4, REFS[0])),
        (3, FormerSlots(4, REFS[0]), 4, FormerSlots(4, REFS[1])),
        (4, FormerSlots(4, REFS[0]), 4, None),
    ],
)
def test_start_looks_at_slots_that_went_out_of_use(
    monkeypatch: pytest.MonkeyPatch, slots: int, former: FormerSlots | None, published: int, kept: FormerSlots | None
) -> None:
    """The system may have lost their output, of which no batch would tell."""
    numbers: list[int] = []
    monkeypatch.setattr(outputs, "publish", lambda *_: [])

    class Job(Session):
        job_uid = "uid"
        latest = replace(Session.latest, operators=[replace(STORED, former_slots=former)])

    parts: Any = (Job(), Shipments(), numbers.append)
    plan = SinkPlan(MemorySink(), "output", slots, StructType())
    made = SinkOutput(plan, BackendSettings("file:///s", "job"), *parts)
    made.start()
    assert made.drain()
    assert (set(numbers), made.operators[0].former_slots) == ({published}, kept)
    made.after_checkpoint(Frame(0), CheckpointRef(10, 0, "m10"))  # type: ignore[arg-type]
    assert made.drain()
    assert numbers[-1] == slots
    made.close()


class Silent(MemorySink):
    """Says nothing about why it refuses, as a sink does that passes on the text of ``TimeoutError()``."""

    def open(self, slot: Slot) -> SlotPublisher:
        """Refuse."""
        raise UnavailableError("")


class Frame:
    """A frame of slots, without Spark."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.sparkSession = MagicMock()

    def mapInArrow(self, task: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], _: str) -> Frame:
        """Run the task at once."""
        answers = task([pa.record_batch({"slot": [*range(self._slots)]})])
        self._rows = [row for batch in answers for row in batch.to_pylist()]
        return self

    def collect(self) -> list[Any]:
        """Return the task's rows."""
        return [SimpleNamespace(**row) for row in self._rows]


def test_a_refusal_without_a_text_is_one() -> None:
    """Otherwise the checkpoint counts as published: the end of the query does not wait, and the log gives it up."""
    shipments: Any = SimpleNamespace(parcel=lambda sink: Parcel(pickle.dumps(sink)))
    session: Any = SimpleNamespace(latest=None, job_uid="uid", check_owned=lambda: None)
    plan = SinkPlan(Silent(), "output", 2, StructType(), BacklogLimits(patience_s=0.2))
    frame: Any = Frame(2)
    made = SinkOutput(plan, BackendSettings("file:///s", "job"), session, shipments, lambda _: [frame])
    try:
        made.after_checkpoint(Frame(0), REFS[0])  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match=r"is not published to sink 'output' after .*: UnavailableError"):
            made.drain()
        assert made.unpublished == 1
    finally:
        made.close()


@pytest.mark.parametrize("slots", [0, 1025, 2.5, "4", True, None])
def test_slots_are_a_number(slots: Any) -> None:
    """A wrong number is refused with the bounds, where it is given."""
    with pytest.raises(InvalidInputError, match=r"slots of a sink must be a whole number within 1\.\.1024, got"):
        SinkPlan(Silent(), "output", slots, StructType())


class Forgetful(MemorySink):
    """Loses each marker."""

    def open(self, slot: Slot) -> SlotPublisher:
        """Return a publisher that finds none."""
        self.marker = None
        return super().open(slot)


def test_marker_that_is_lost_while_the_first_checkpoints_wait_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were logged when nothing was published; the second one would be published with the first one's output."""
    may_publish = threading.Event()
    monkeypatch.setattr(tasks, "kept_client", lambda _: None)
    monkeypatch.setattr(tasks, "read_output", lambda *_, **__: iter(()))

    def frames(_: int) -> Any:
        may_publish.wait(30)
        return [Frame(1)]

    sink = Forgetful()
    shipments: Any = SimpleNamespace(parcel=lambda _: SimpleNamespace(unpack=lambda: sink))
    session: Any = SimpleNamespace(latest=None, job_uid="uid", check_owned=lambda: None)
    plan = SinkPlan(sink, "output", 1, StructType(), BacklogLimits(patience_s=0.3))
    made = SinkOutput(plan, BackendSettings("file:///s", "job"), session, shipments, frames)
    try:
        for ref in REFS:
            made.after_checkpoint(Frame(0), ref)  # type: ignore[arg-type]
        may_publish.set()
        with pytest.raises(UnavailableError, match="has published, but its marker is gone"):
            made.drain()
    finally:
        made.close()
