"""
The simulated hosts: slots that restore, verify and append over HTTP, each over its own connection.

Written for gevent: every slot is a greenlet, and a slot that waits for the service lets the others run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import gevent
from gevent.pool import Group
from gevent.queue import Empty, Queue

from backend_client.service.client import ServiceClient
from dstl_service.wire import ChangeSetRef, LogTarget
from loadtest.load.key_patterns import Changes
from loadtest.load.settings import LoadSettings
from loadtest.load.workload import PlannedSet, SimulatedTable, TaskPlan, Workload, WrongDataError
from storage.change_set import decode_change_set
from storage.checksum import checksum64
from storage.errors import error_from_dict
from storage.key_groups import KeyGroupRange, key_group_range

OPERATOR = "load"
ATTEMPTS_PER_TASK = 2
"""Attempts: one that Spark may not accept, and one that it accepts."""


class HostGoneError(RuntimeError):
    """The host left before it began its part of a batch; the others run the batch again. Not a failure."""


class Record(Protocol):
    """Receives measured requests."""

    def __call__(self, name: str, elapsed_ms: float, size_bytes: int, error: Exception | None) -> None:
        """Record one request of the kind `name`; an `error` means that it failed."""
        ...


@dataclass(slots=True)
class Measured:
    """Data that a measured block reports, and its duration."""

    size_bytes: int = 0
    elapsed_ms: float = 0.0


@contextmanager
def measured(record: Record, name: str) -> Iterator[Measured]:
    """Report the block as one request, with its error if it raises one; report nothing if its host has left."""
    request = Measured()
    started_s = time.perf_counter()
    try:
        yield request
    except HostGoneError:
        raise
    except Exception as error:
        record(name, (time.perf_counter() - started_s) * 1000, request.size_bytes, error)
        raise
    request.elapsed_ms = (time.perf_counter() - started_s) * 1000
    record(name, request.elapsed_ms, request.size_bytes, None)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The receipt of an accepted task, and the content of its sets."""

    partition: int
    refs: list[ChangeSetRef]
    changes: Changes


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of a batch's tasks from the driver; each puts its result, or its error, into `results`."""

    checkpoint_id: int
    epoch: int
    attempt_first: int
    base: str | None
    parallelism: int
    max_parallelism: int
    truth: SimulatedTable
    """Content of the completed checkpoints up to `base`."""
    results: Queue[TaskResult | Exception]


class SimulatedHost:
    """
    A host with slots, which runs the batches that the driver gives it.

    Args:
        settings: The load test's.
        slots: Number of tasks that run here in parallel.
        record: Receives its requests.
    """

    def __init__(self, settings: LoadSettings, slots: int, record: Record) -> None:
        assert settings.service is not None
        self._workload = Workload(settings.seed, settings.max_parallelism, settings.workload)
        self._slots = [
            _Slot(ServiceClient(settings.service, settings.token), settings.job, record) for _ in range(slots)
        ]
        self._work: Queue[tuple[Batch, int]] = Queue()
        self._ahead: dict[tuple[int, int, int], TaskPlan] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def give(self, batch: Batch, partition_first: int) -> None:
        """Hand over a batch: this host runs one partition per slot, from this one on."""
        self._work.put((batch, partition_first))
        if self._is_closed:
            self._give_back()

    def serve(self, timeout_s: float) -> None:
        """Run the tasks of the next batch, if one arrives in time."""
        try:
            batch, partition_first = self._work.get(timeout=timeout_s)
        except Empty:
            return
        tasks = Group()
        for partition, slot in zip(self._partitions(batch, partition_first), self._slots, strict=False):
            tasks.spawn(self._run, slot, batch, partition)
        tasks.join()
        self._plan_ahead(batch, self._partitions(batch, partition_first))

    def _plan_ahead(self, batch: Batch, partitions: range) -> None:
        """Generate the changes of the next batch while the checkpoint is completed."""
        self._ahead.clear()
        for partition in partitions:
            gevent.sleep(0)  # the driver runs first
            key = (batch.checkpoint_id + 1, partition, batch.parallelism)
            self._ahead[key] = self._workload.plan(*key)

    def close(self) -> None:
        """Leave: return the batches not begun, and close all connections."""
        self._is_closed = True
        self._give_back()
        for slot in self._slots:
            slot.close()

    def _give_back(self) -> None:
        while not self._work.empty():
            batch, partition_first = self._work.get_nowait()
            for _ in self._partitions(batch, partition_first):
                batch.results.put(HostGoneError("the host left"))

    def _partitions(self, batch: Batch, partition_first: int) -> range:
        return range(partition_first, min(partition_first + len(self), batch.parallelism))

    def _run(self, slot: _Slot, batch: Batch, partition: int) -> None:
        key = (batch.checkpoint_id, partition, batch.parallelism)
        plan = self._ahead.pop(key, None) or self._workload.plan(*key)
        try:
            batch.results.put(slot.run(batch, partition, plan))
        except Exception as error:  # noqa: BLE001 - after any error the driver must not wait for this task for ever
            batch.results.put(error)


class _Slot:
    """Runs one task at a time, with the table that the previous task left here."""

    def __init__(self, client: ServiceClient, job: str, record: Record) -> None:
        self._client = client
        self._job = job
        self._record = record
        self._table: SimulatedTable | None = None

    def run(self, batch: Batch, partition: int, plan: TaskPlan) -> TaskResult:
        """Advance the table to the base, verify it, and log the planned changes."""
        key_groups = key_group_range(partition, batch.parallelism, batch.max_parallelism)
        if self._table is None or self._table.key_groups != key_groups or plan.is_table_lost:
            self._table = SimulatedTable(key_groups)
        self._advance(self._table, batch)
        if plan.rescaled is not None:
            self._advance(SimulatedTable(plan.rescaled), batch)
        attempt = batch.attempt_first + ATTEMPTS_PER_TASK * partition
        if plan.loser is not None:
            self._append(batch, partition, key_groups, attempt, 0, plan.loser, preemptive=False)
        refs = []
        for sqn, planned in enumerate(plan.sets):
            preemptive = sqn < len(plan.sets) - 1
            ref = self._append(batch, partition, key_groups, attempt + 1, sqn, planned, preemptive=preemptive)
            if plan.is_sent_twice and ref != self._append(
                batch, partition, key_groups, attempt + 1, sqn, planned, preemptive=preemptive
            ):
                raise WrongDataError(f"the same change set got two references: {ref}")
            refs.append(ref)
        return TaskResult(partition, refs, plan.changes())

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _advance(self, table: SimulatedTable, batch: Batch) -> None:
        if batch.base is None:
            table.clear()
        elif table.version != batch.base:
            with measured(self._record, "restore") as request:
                try:
                    request.size_bytes = _restore(self._client, self._job, table, batch.base)
                    table.check(batch.truth)
                except BaseException:
                    table.clear()
                    raise

    def _append(
        self,
        batch: Batch,
        partition: int,
        key_groups: KeyGroupRange,
        attempt: int,
        sqn: int,
        planned: PlannedSet,
        *,
        preemptive: bool,
    ) -> ChangeSetRef:
        payload = planned.payload
        target = LogTarget(self._job, OPERATOR, batch.checkpoint_id, batch.epoch, attempt, partition, key_groups)
        with measured(self._record, "append") as request:
            request.size_bytes = len(payload)
            return self._client.append(
                target, sqn, payload, checksum64(payload), len(planned.changes), preemptive=preemptive
            )


class _GoneError(Exception):
    """The change sets between the table's version and the base were deleted meanwhile."""


def _restore(client: ServiceClient, job: str, table: SimulatedTable, to_checkpoint: str) -> int:
    """Bring the table to `to_checkpoint`; return the bytes received."""
    try:
        return _apply(client, job, table, to_checkpoint)
    except _GoneError:
        table.clear()
        return _apply(client, job, table, to_checkpoint)


def _apply(client: ServiceClient, job: str, table: SimulatedTable, to_checkpoint: str) -> int:
    size_bytes = 0
    with client.restore(job, OPERATOR, table.key_groups, table.version, to_checkpoint) as frames:
        for header, payload in frames:
            kind, error = header["kind"], header.get("error")
            if kind == "plan":
                if header["full"]:
                    table.clear()
            elif kind == "segment":
                if f"{checksum64(payload):016x}" != header["checksum"]:
                    raise WrongDataError(f"a segment of {header['object']} does not match its checksum")
                table.apply(dict(decode_change_set(payload, str(header["object"]))))
                size_bytes += len(payload)
            elif kind == "gone":
                raise _GoneError
            elif kind == "error" and isinstance(error, dict):
                raise error_from_dict(error)
            elif kind != "end":
                raise WrongDataError(f"a restore has a frame of unexpected kind {kind!r}")
    table.version = to_checkpoint
    return size_bytes
