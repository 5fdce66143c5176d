"""The tasks of a sink that publishes exactly once: one logs a batch's rows, one publishes a slot from the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from backend_client.service.job_session import kept_client
from backend_client.service.log_writer import LogWriter
from backend_client.service.output_log import read_output
from backend_client.settings import BackendSettings
from backend_client.sinks.protocol import Sink, Slot
from backend_client.sinks.records import change_sets, epoch_of, record_batches
from backend_client.sinks.slot_publishing import LoggedRecords, Target, publish_slot
from backend_client.spark.batch import BatchContext, is_reachable
from backend_client.spark.output.apart import run_apart
from backend_client.spark.private.worker_connection import without_delay
from backend_client.spark.shipping import Parcel
from dstl_service.wire import ChangeSetRef, CheckpointRef, LogTarget
from storage.errors import NotFoundError, UnavailableError
from storage.key_groups import KeyGroupRange

_LOGGED = "refs string"
_PUBLISHED = "refusal string"


@dataclass(frozen=True, slots=True)
class LogTask:
    """
    The function that ``mapInArrow`` runs on a batch's result: it writes a partition's rows to the log.

    Args:
        sink: Name of the sink.
        slots: Its number of slots.
        parallelism: Number of partitions of the last operator. Both passes' partitions of a number use one slot.
        batch: The batch.
        names: The result's columns, if the rows come under other names.
    """

    sink: str
    slots: int
    parallelism: int
    batch: BatchContext
    names: tuple[str, ...] | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row with the references of the change sets, in order and as JSON; none if there were no rows."""
        context = TaskContext.get()
        assert context is not None
        batch, settings = self.batch, self.batch.settings
        slot = context.partitionId() % self.parallelism * self.slots // self.parallelism
        target = LogTarget(
            settings.job,
            self.sink,
            batch.checkpoint_id,
            batch.epoch,
            context.taskAttemptId(),
            context.partitionId(),
            KeyGroupRange(slot, slot),
            batch.job_uid,
        )
        writer = LogWriter(kept_client(settings), target)
        size_bytes = settings.preemptive_bytes
        rows_in = without_delay(batches)
        named = rows_in if self.names is None else (rows.rename_columns([*self.names]) for rows in rows_in)
        for changes, _ in change_sets(named, slot, batch.epoch, size_bytes):
            writer.append(changes, preemptive=sum(len(value or b"") for value in changes.values()) >= size_bytes)
        if not writer.refs:
            return
        if not is_reachable(batch, writer.refs):
            writer.make_durable()
        yield pa.RecordBatch.from_pydict({"refs": [json.dumps([asdict(ref) for ref in writer.refs])]})


def log_rows(task: LogTask, frame: DataFrame) -> list[ChangeSetRef]:
    """Run a task on a batch's result; return the references of the change sets of all its partitions."""
    names = frame.columns
    if any("." in name or "`" in name for name in names):  # ``mapInArrow`` looks names up without quotes
        task, frame = replace(task, names=tuple(names)), frame.toDF(*(f"_{at}" for at in range(len(names))))
    rows = frame.mapInArrow(task.__call__, _LOGGED).collect()
    return [ChangeSetRef(**ref) for row in rows for ref in json.loads(row.refs)]


@dataclass(frozen=True, slots=True)
class PublishTask:
    """
    The function that ``mapInArrow`` runs to publish one slot.

    Args:
        settings: The job's settings.
        job_uid: The job's uid.
        name: Name of the sink.
        sink: The sink.
        target: Up to where to publish.
        columns: The query's output columns.
    """

    settings: BackendSettings
    job_uid: str
    name: str
    sink: Parcel
    target: Target
    columns: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """
        Publish the slots whose numbers the rows have; yield why some are refused.

        A system that does not answer, or refuses, is the publisher's matter: if the task failed, Spark would repeat it
        at once several times, and each might wait as long, before the publisher is told. The same holds for checkpoints
        that were subsumed while this read them: each attempt would look for them again, the publisher knows newer ones.
        """
        sink: Sink = self.sink.unpack()
        for batch in without_delay(batches):
            for number in batch.column(0).to_pylist():
                slot = Slot(self.settings.job, self.job_uid, self.name, number, self.columns)
                try:
                    publish_slot(sink, slot, partial(self._read, slot), self.target)
                except (UnavailableError, NotFoundError) as error:
                    yield pa.RecordBatch.from_pydict({"refusal": [str(error) or type(error).__name__]})

    def _read(self, slot: Slot, after: CheckpointRef | None) -> Iterator[LoggedRecords]:
        client, target = kept_client(self.settings), self.target
        is_set_back = target.is_set_back(slot, None if after is None else after.id)
        for checkpoint_id, source, changes in read_output(
            client, slot.job, slot.sink, slot.number, after, target.checkpoint, target.newest, is_set_back=is_set_back
        ):
            yield LoggedRecords(epoch_of(changes, source), checkpoint_id, record_batches(changes, source))


def publish(task: PublishTask, frames: Sequence[DataFrame], group: str) -> list[str]:
    """Run a task on frames of slots, each in a Spark job of its own of this group; return why slots are refused."""
    text = f"publish checkpoint {task.target.checkpoint.id} of {task.settings.job} to sink {task.name}"
    spark = frames[0].sparkSession
    spark.sparkContext.setJobGroup(group, text)  # of the publisher's thread
    answers = run_apart(spark, [frame.mapInArrow(task.__call__, _PUBLISHED).collect for frame in frames])
    return [row.refusal for of_job in answers for row in of_job]


def end_jobs(group: str) -> None:
    """End the Spark jobs of a group; a Python process that waits in one of their tasks is killed."""
    SparkSession.active().sparkContext.cancelJobGroup(group)
