"""
Where a query's result goes, and when: before its checkpoint exists, after it, or with it.

*At least once*: the function runs before the checkpoint exists, and again if the batch is executed again. *At most
once*: it runs after, and never again. *Exactly once*: the rows are logged with the checkpoint, and a sink publishes
them when it exists.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from backend_client.service.job_session import JobSession
from backend_client.settings import BackendSettings
from backend_client.sinks.protocol import Sink, Slot
from backend_client.sinks.slot_publishing import Target
from backend_client.spark.batch import BatchContext
from backend_client.spark.output.publisher import BacklogLimits, Publisher
from backend_client.spark.output.spark_sinks import BatchFunction, BatchIds, ForeachRows, check_unused
from backend_client.spark.output.stored_sinks import closed_sinks, first_target, steps_to, stored_sinks
from backend_client.spark.output.tasks import LogTask, PublishTask, end_jobs, log_rows, publish
from backend_client.spark.private.frames import arrow_schema
from backend_client.spark.shipping import Shipments
from dstl_service.wire import SINK, ChangeSetRef, CheckpointRef, FormerSlots, JobInfo, OperatorInfo
from storage.errors import InvalidInputError, UnavailableError
from storage.validation import validate_name

PlaceNumbers = Callable[[int], Sequence[DataFrame]]
"""Returns frames with the numbers 0 to n - 1, each in a partition of its own; see `slots_placer`."""


class LostOutputError(RuntimeError):
    """The function of an at-most-once query failed after the checkpoint: the batch's output is lost."""


class Output:
    """A query's output on the driver, one batch after the other; this one has none, and its methods do nothing."""

    @property
    def operators(self) -> Sequence[OperatorInfo]:
        """The output as manifests describe it."""
        return ()

    @property
    def unpublished(self) -> int:
        """Number of checkpoints whose output is not published yet."""
        return 0

    @property
    def is_seen_early(self) -> bool:
        """Whether rows are seen before their checkpoint exists: a batch that is executed again must have the same."""
        return False

    def start(self) -> None:
        """Begin, before the first batch."""

    def before_batch(self, last: OperatorInfo) -> None:
        """Wait until the next batch may begin; `last` is the last operator in it."""

    def log(self, frame: DataFrame, context: BatchContext) -> Sequence[ChangeSetRef]:
        """Write the batch's rows to the log; return the change sets that become part of the checkpoint."""
        return ()

    def before_checkpoint(self, frame: DataFrame, batch_id: int) -> None:
        """Write the batch's rows while its changes are uploaded."""

    def after_checkpoint(self, frame: DataFrame, checkpoint: CheckpointRef) -> None:
        """Write or publish the rows of a batch whose checkpoint exists."""

    def stop_waiting(self) -> None:
        """Let no batch wait any more: the query is being stopped."""

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is published; return whether it is."""
        return True

    def close(self) -> None:
        """Release what the output holds."""


class OutputPlan(Protocol):
    """An output before the query takes its job over."""

    def check(self, settings: BackendSettings, job: JobInfo | None, shipments: Shipments) -> None:
        """Check that it can be used; `InvalidInputError` or `UnavailableError` if not."""

    def open(
        self,
        settings: BackendSettings,
        session: JobSession,
        shipments: Shipments,
        place_numbers: PlaceNumbers,
        ids: BatchIds,
    ) -> Output:
        """Return the output of a query that owns its job."""


@dataclass(frozen=True, slots=True)
class FunctionOutput(Output):
    """
    A function that gets each batch's rows.

    Args:
        function: The function.
        at_most_once: Whether it runs after the checkpoint, and never again.
        ahead: How many batches it has seen that were given up by rewinds, if it numbers batches itself.
        operators: Sinks of former queries.
    """

    function: BatchFunction
    at_most_once: bool = False
    ahead: int = 0
    operators: Sequence[OperatorInfo] = ()

    @property
    def is_seen_early(self) -> bool:
        """Whether the function runs before the checkpoint exists."""
        return not self.at_most_once

    def before_checkpoint(self, frame: DataFrame, batch_id: int) -> None:
        """Call the function if it runs at least once."""
        if not self.at_most_once:
            self.function(frame, batch_id + self.ahead)

    def after_checkpoint(self, frame: DataFrame, checkpoint: CheckpointRef) -> None:
        """
        Call the function if it runs at most once.

        Raises:
            LostOutputError: It failed; it is not called again for this batch.
        """
        if not self.at_most_once:
            return
        try:
            self.function(frame, checkpoint.id + self.ahead)
        except BaseException as error:  # also one that ends its thread
            raise LostOutputError(
                f"the output of batch {checkpoint.id} is lost in whole or in part, as guarantee='at-most-once' allows: "
                f"{error}"
            ) from error


class SinkOutput(Output):
    """
    A sink that publishes what is logged with the checkpoints; before that, no reader may see the rows.

    Args:
        plan: The sink, as the user asked for it.
        settings: The job's settings.
        session: The query's ownership of its job.
        shipments: Sends the sink to tasks.
        place_numbers: Places the tasks that publish.
    """

    def __init__(
        self,
        plan: SinkPlan,
        settings: BackendSettings,
        session: JobSession,
        shipments: Shipments,
        place_numbers: PlaceNumbers,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._session = session
        self._parcel = shipments.parcel(plan.sink)
        self._place_numbers = place_numbers
        self._closed = closed_sinks(session.latest, plan.name, plan.system, plan.abandoned)
        self._logged_bytes = 0
        latest = session.latest
        self._known = stored_sinks(latest).get(plan.name)
        self._slots = plan.slots if self._known is None else max(plan.slots, self._known.slots_ever)
        self._former_slots = None if self._known is None else self._known.former_slots
        self._marked_slots = 0  # after the first publish all have a marker
        tables = [info for info in latest.operators if info.has_table] if latest is not None else []
        self._keys = (tables[-1].name, tables[-1].parallelism) if tables else None
        known = self._known if self._known is not None and self._known.kind == SINK else None
        self._jobs = f"dstl-publish-{uuid.uuid4()}"
        self._publisher = Publisher(
            f"sink {plan.name!r}",
            self._publish,
            plan.limits,
            known,
            session.check_owned,
            partial(end_jobs, self._jobs),
            lambda: shipments.is_spark_stopped,
        )

    @property
    def unpublished(self) -> int:
        """Number of checkpoints whose output is not published yet."""
        return self._publisher.backlog[0]

    def start(self) -> None:
        """
        Have published what an earlier run left; wait for it if later output relies on it.

        Raises:
            UnavailableError: The sink cannot be reached after a rewind or a change of its slots, or when it is new.
        """
        latest, slots = self._session.latest, self._plan.slots
        if latest is not None:
            target, must_end = first_target(latest, self._known, slots, self._session.stored())
            for step in steps_to(target):
                self._publisher.submit(step, 0)
            if must_end:
                self._publisher.drain()
                self._former_slots = FormerSlots(self._slots, latest.ref) if slots < self._slots else None
        self._slots = slots

    @property
    def operators(self) -> Sequence[OperatorInfo]:
        """The sink, up to where it has published, and sinks of former queries."""
        plan = self._plan
        own = OperatorInfo(plan.name, plan.slots, plan.system, {}, kind=SINK, former_slots=self._former_slots)
        return (self._publisher.described(own), *self._closed)

    def before_batch(self, last: OperatorInfo) -> None:
        """Wait for room in the backlog; if keys move to other slots, until everything before is published."""
        keys = last.name, last.parallelism
        self._publisher.wait_for_room(until_empty=self._keys not in (None, keys))
        self._keys = keys

    def log(self, frame: DataFrame, context: BatchContext) -> Sequence[ChangeSetRef]:
        """Write the batch's rows to the log."""
        assert self._keys is not None
        task = LogTask(self._plan.name, self._plan.slots, self._keys[1], context)
        refs = log_rows(task, frame)
        self._logged_bytes = sum(ref.size_bytes for ref in refs)
        return refs

    def after_checkpoint(self, frame: DataFrame, checkpoint: CheckpointRef) -> None:
        """Have the checkpoint's output published."""
        self._publisher.submit(Target(checkpoint), self._logged_bytes)

    def stop_waiting(self) -> None:
        """Let no batch wait any more."""
        self._publisher.stop_waiting()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is published. Raises as `Publisher.drain`."""
        return self._publisher.drain(timeout_s)

    def close(self) -> None:
        """Stop publishing; what is left is published by the next start."""
        self._publisher.close()

    def _publish(self, target: Target) -> None:
        columns = arrow_schema(self._plan.schema)
        target = replace(target, marked_slots=max(target.marked_slots, self._marked_slots))
        task = PublishTask(self._settings, self._session.job_uid, self._plan.name, self._parcel, target, columns)
        former = 0 if target.former_slots is None else target.former_slots.number
        if refusals := publish(task, self._place_numbers(max(self._slots, former)), self._jobs):
            raise UnavailableError(refusals[0])
        self._marked_slots = self._slots


@dataclass(frozen=True, slots=True)
class FunctionPlan:
    """
    A function as output, before the query takes its job over; see `FunctionOutput`.

    With `numbers_batches` it is a sink of Spark, which leaves out batches up to the newest one that it has seen: after
    a rewind, whose batches have the ids of others, it gets greater ones.
    """

    function: BatchFunction | ForeachRows
    at_most_once: bool = False
    abandoned: frozenset[str] = frozenset()
    numbers_batches: bool = False

    def check(self, settings: BackendSettings, job: JobInfo | None, shipments: Shipments) -> None:
        """Check that the function can be sent to tasks, and what `closed_sinks` checks; `InvalidInputError` if not."""
        closed_sinks(job.latest if job else None, "", "", self.abandoned)
        if isinstance(self.function, ForeachRows):
            self.function.shipped(shipments)

    def open(
        self,
        settings: BackendSettings,
        session: JobSession,
        shipments: Shipments,
        place_numbers: PlaceNumbers,
        ids: BatchIds,
    ) -> Output:
        """Return the output of a query that owns its job; `ConflictError` if its folder has batches of another one."""
        check_unused(self.function, ids.first)
        function, once = self.function, self.at_most_once
        shipped = function.shipped(shipments, at_most_once=once) if isinstance(function, ForeachRows) else function
        closed = closed_sinks(session.latest, "", "", self.abandoned)
        return FunctionOutput(shipped, self.at_most_once, ids.ahead if self.numbers_batches else 0, closed)


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """
    A sink as output, before the query takes its job over.

    Args:
        sink: The sink.
        name: Its name within the job.
        slots: Number of slots.
        schema: The query's output columns.
        limits: Bounds of what is unpublished.
    """

    sink: Sink
    name: str
    slots: int
    schema: StructType
    limits: BacklogLimits = field(default_factory=BacklogLimits)
    abandoned: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        validate_name("sink", self.name)
        if type(self.slots) is not int or not 1 <= self.slots <= 1024:
            raise InvalidInputError(f"slots of a sink must be a whole number within 1..1024, got {self.slots!r}")

    @property
    def system(self) -> str:
        """The kind of the sink. Another kind would begin with markers of its own, and publish output twice."""
        return type(self.sink).__qualname__

    def check(self, settings: BackendSettings, job: JobInfo | None, shipments: Shipments) -> None:
        """Check that the sink can be used; raises as `Sink.check` and `closed_sinks`."""
        closed_sinks(job.latest if job else None, self.name, self.system, self.abandoned)
        shipments.parcel(self.sink)
        slots = [Slot(settings.job, job.job_uid if job else "", self.name, number) for number in range(self.slots)]
        self.sink.check(arrow_schema(self.schema), slots)

    def open(
        self,
        settings: BackendSettings,
        session: JobSession,
        shipments: Shipments,
        place_numbers: PlaceNumbers,
        ids: BatchIds,
    ) -> Output:
        """Return the output of a query that owns its job; markers tell branches apart, so `ids` are not needed."""
        # A slot is logged as a key group.
        plan = replace(self, slots=min(self.slots, session.max_parallelism))
        return SinkOutput(plan, settings, session, shipments, place_numbers)
