"""
The treatment of a query's partitions while their tables are being restored, batch by batch.

A task whose table is not ready within its patience leaves its partition *stalled*: its rows are set aside, or it had
none. Its table is then restored beside the batches, and the first batch that finds it runs the waiting rows before its
own. The newest checkpoint lists the waiting rows, so a batch that is executed again begins with the same ones.

A query's first batch and one with another parallelism wait for all tables: all waiting rows run there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.failover.losses import LossWindow
from backend_client.failover.patience import PartitionState, Patience, TaskFailover, patience
from backend_client.failover.set_aside_entries import (
    Waiting,
    after_batch,
    by_owner,
    companion_info,
    companion_of,
    to_run,
    waiting_of,
    without_lost,
)
from backend_client.settings import BOUNDED_LOSS, EXACT, FORGET, KEEP, REPLAY, BackendSettings
from backend_client.spark.batch import Receipt
from backend_client.spark.failover.restoring import Restoring
from backend_client.spark.query import Operator
from dstl_service.wire import SET_ASIDE_MAX, ChangeSetRef, CheckpointInfo, OperatorInfo, RowsSetAside
from storage.key_groups import KeyGroupRange, key_group_range

_AT_ONCE = Patience(0.0, sets_aside=False)


class BatchMustWaitError(Exception):
    """More rows would be set aside than the query allows: the batch is executed again, and waits for its tables."""


@dataclass(slots=True)
class _Known:
    """The state of an operator's partitions after its newest batch."""

    losses: LossWindow
    parallelism: int = 0
    next_due_ms: dict[int, int | None] = field(default_factory=dict)
    """By partition, a lower bound on what is due next, None: nothing; a partition is missing if that is unknown."""
    stalled_since_s: dict[int, float] = field(default_factory=dict)
    """By partition, when something of it was set aside that has not run."""


class Failover:
    """
    A query's failover.

    Args:
        settings: The job's settings.
        operators: The query's operators.
        max_parallelism: The job's number of key groups.
        restoring: Restores tables beside the batches.
    """

    def __init__(
        self, settings: BackendSettings, operators: Sequence[Operator], max_parallelism: int, restoring: Restoring
    ) -> None:
        self.settings = settings
        self.operators = {operator.name: operator for operator in operators}
        self.max_parallelism = max_parallelism
        self.restoring = restoring
        self.known = {name: _Known(LossWindow(settings.max_lost_fraction)) for name in self.operators}
        self._has_counted = False

    def begin(
        self,
        checkpoint_id: int,
        latest: CheckpointInfo | None,
        infos: Sequence[OperatorInfo],
        at: BatchTime | None,
        *,
        must_wait: bool,
    ) -> BatchFailover:
        """
        Begin a try of a batch; wait for the restores beside the batches if it runs all waiting rows.

        Args:
            checkpoint_id: The batch.
            latest: The newest checkpoint.
            infos: The operators, with the batch's parallelism.
            at: The batch's time; None if no operator uses time.
            must_wait: Whether the batch is exact whatever the query's mode.

        Raises:
            UnavailableError: The query is being stopped while it waits.
        """
        now_s = time.monotonic()
        is_new = any(self.known[info.name].parallelism != info.parallelism for info in infos)
        is_exact = self.settings.failover == EXACT or must_wait or is_new
        stalled = [since_s for known in self.known.values() for since_s in known.stalled_since_s.values()]
        self.restoring.keep({info.name: info.parallelism for info in infos})
        if must_wait or is_new or any(now_s - since_s >= self.settings.max_stall_s for since_s in stalled):
            self.restoring.wait()
        waiting, handling = waiting_of(latest), KEEP
        if not any(known.parallelism for known in self.known.values()):  # the first batch of this run
            handling = self.settings.lost_rows
            if not self._has_counted:  # it may have to be tried again
                self._count_earlier_losses(waiting, now_s)
        if handling == FORGET:
            waiting = {name: without_lost(entries) for name, entries in waiting.items()}
        replays = handling == REPLAY
        return BatchFailover(self, checkpoint_id, waiting, at, now_s, is_exact=is_exact, replays=replays)

    def _count_earlier_losses(self, waiting: Mapping[str, Waiting], now_s: float) -> None:
        """Count what an earlier run lost as lost now: when it was, and among how many rows, is not stored."""
        self._has_counted = True
        for name, known in self.known.items():
            lost = sum(entry.rows for entry in waiting.get(companion_of(name), ()) if entry.is_lost)
            known.losses.add(now_s, 0, lost)

    def close(self) -> None:
        """Begin no further restore, and let no batch wait for one: the query is being stopped."""
        self.restoring.close()

    def columns_of(self, operator: str) -> str:
        """Return the description of the columns of an operator's rows."""
        return self.operators[operator].input_schema.simpleString()

    def key_groups(self, info: OperatorInfo, partition: int) -> KeyGroupRange:
        """Return a partition's key groups."""
        return key_group_range(partition, info.parallelism, self.max_parallelism)

    def is_idle(self, info: OperatorInfo, partition: int, watermark_ms: int) -> bool:
        """Return whether it is certain that nothing is due in a partition up to a watermark."""
        operator, known = self.operators[info.name], self.known[info.name]
        if not operator.uses_time:
            return True
        if operator.time_mode is TimeMode.PROCESSING or known.parallelism != info.parallelism:
            return False
        due_ms = known.next_due_ms.get(partition, watermark_ms)
        return due_ms is None or due_ms > watermark_ms


class BatchFailover:
    """One try of a batch: what its tasks are told, and what waits after it."""

    def __init__(
        self,
        query: Failover,
        checkpoint_id: int,
        waiting: Mapping[str, Waiting],
        at: BatchTime | None,
        now_s: float,
        *,
        is_exact: bool,
        replays: bool,
    ) -> None:
        self._query = query
        self._checkpoint_id = checkpoint_id
        self._waiting = waiting
        self._by_owner: dict[str, Mapping[int, Waiting]] = {}
        self._to_run = waiting if replays else {name: without_lost(entries) for name, entries in waiting.items()}
        self._time = at
        self._now_s = now_s
        self._is_exact = is_exact
        self._replays = replays
        self._watermark_ms = 0 if at is None else at.watermark_ms
        self._infos: dict[str, OperatorInfo] = {}
        self._receipts: dict[str, list[Receipt]] = {}
        self._after: dict[str, Waiting] = {}
        self._adding: dict[str, set[int]] = {}
        self._untried: dict[str, set[int]] = {}
        """Partitions whose tables are being restored beside the batches, so that no task looks for them."""

    def for_tasks(self, info: OperatorInfo, *, can_stall: bool) -> TaskFailover:
        """Return what an operator's tasks are told in the first pass; without `can_stall` they wait for tables."""
        query, settings = self._query, self._query.settings
        known, companion = query.known[info.name], companion_of(info.name)
        patiences: dict[int, Patience] = {}
        waiting: dict[int, Waiting] = {}
        alike: dict[Patience, Patience] = {}
        untried = self._untried[info.name] = set()
        for partition in range(info.parallelism):
            if entries := self._entries(info, partition):
                waiting[partition] = entries
            state = PartitionState(
                has_waiting=bool(entries),
                is_idle=query.is_idle(info, partition, self._watermark_ms),
                is_restoring=query.restoring.is_running(info.name, info.parallelism, partition),
                stalled_s=self._now_s - known.stalled_since_s.get(partition, self._now_s),
            )
            if state.is_restoring:
                untried.add(partition)
            found = patience(state, settings.failover_patience_s, settings.max_stall_s, is_exact=self._is_exact)
            if can_stall and found is not None:
                patiences[partition] = alike.setdefault(found, found)
        return TaskFailover(companion, patiences, waiting)

    def for_second_pass(self, info: OperatorInfo, watermark_ms: int) -> TaskFailover:
        """Return the instructions for the second pass: stalled partitions without rows or due work stay stalled."""
        stalled = [
            receipt.partition
            for receipt in self._stalled(info.name)
            if not self._is_exact or self._query.is_idle(info, receipt.partition, watermark_ms)
        ]
        return TaskFailover(companion_of(info.name), dict.fromkeys(stalled, _AT_ONCE))

    def took(self, info: OperatorInfo, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Take an operator's receipts of the first pass; return them, those of an exact batch with all that is due."""
        self._infos[info.name] = info
        self._receipts[info.name] = list(receipts)
        stalled = {receipt.partition for receipt in receipts if receipt.is_stalled}
        # A restore that has ended meanwhile is not begun again: it would run into the next batch, which would not try.
        stalled -= self._untried.get(info.name, set())
        self._query.restoring.request(info.name, info.parallelism, sorted(stalled))
        if not self._is_exact:
            return list(receipts)
        dues = self._query.known[info.name].next_due_ms
        return [replace(r, next_due_ms=dues.get(r.partition)) if r.is_stalled else r for r in receipts]

    def took_again(self, info: OperatorInfo, receipts: Sequence[Receipt]) -> None:
        """Take an operator's receipts of the second pass."""
        stalled = {receipt.partition for receipt in receipts if receipt.is_stalled}
        self._receipts[info.name] = [
            *(
                receipt
                for receipt in self._receipts[info.name]
                if not receipt.is_stalled or receipt.partition in stalled
            ),
            *(receipt for receipt in receipts if not receipt.is_stalled),
        ]

    def close(self, closed_ms: int | None) -> None:
        """
        Determine what waits after the batch, which was closed at a watermark or left open (None).

        Raises:
            BatchMustWaitError: It is more than the query allows.
        """
        for name, info in self._infos.items():
            stalled = self._stalled(name)
            by_partition = {receipt.partition: [*self._added(info, receipt, closed_ms)] for receipt in stalled}
            self._adding[name] = {partition for partition, entries in by_partition.items() if entries}
            added = [*chain.from_iterable(by_partition.values())]
            key_groups = [self._query.key_groups(info, receipt.partition) for receipt in stalled]
            waiting = self._waiting.get(companion_of(name), ())
            self._after[name] = after_batch(waiting, key_groups, added, with_lost=self._replays)
        for name in filter(self._adding.get, self._infos):  # at last: a limit counts all operators together
            self._check(name)

    @property
    def refs(self) -> list[ChangeSetRef]:
        """The change sets of the rows set aside."""
        return [ref for receipts in self._receipts.values() for receipt in receipts for ref in receipt.set_aside]

    @property
    def companions(self) -> list[OperatorInfo]:
        """The checkpoint's entries for waiting rows; none for an operator that never had any."""
        return [
            companion_info(info, self._query.columns_of(name), self._after[name])
            for name, info in self._infos.items()
            if self._after[name] or companion_of(name) in self._waiting
        ]

    @property
    def rows_waiting(self) -> int:
        """Number of deferred rows that wait after the batch."""
        return sum(entry.rows for entries in self._after.values() for entry in entries if not entry.is_lost)

    @property
    def rows_lost(self) -> int:
        """Number of rows of the batch that are lost unless a start asks for them."""
        return sum(map(self._lost, self._infos))

    def completed(self) -> None:
        """Remember what the next batch needs to know; the batch's checkpoint exists."""
        for name, info in self._infos.items():
            known, receipts = self._query.known[name], self._receipts[name]
            if known.parallelism != info.parallelism:
                known.parallelism, known.next_due_ms = info.parallelism, {}
            run = {receipt.partition: receipt for receipt in receipts if not receipt.is_stalled}
            known.next_due_ms.update({partition: receipt.next_due_ms for partition, receipt in run.items()})
            waiting = {entry.key_groups for entry in self._after[name] if not entry.is_lost}
            stalled = {receipt.partition for receipt in receipts if receipt.is_stalled}
            for partition in stalled:
                if self._query.key_groups(info, partition) in waiting:
                    known.next_due_ms.pop(partition, None)
            since_s = dict.fromkeys(self._adding[name], self._now_s) | known.stalled_since_s
            known.stalled_since_s = {number: at for number, at in since_s.items() if number in stalled}
            known.losses.add(self._now_s, sum(receipt.rows for receipt in receipts), self._lost(name))

    def _stalled(self, name: str) -> list[Receipt]:
        return [receipt for receipt in self._receipts[name] if receipt.is_stalled]

    def _entries(self, info: OperatorInfo, partition: int) -> Waiting:
        if info.name not in self._by_owner:
            waiting = self._to_run.get(companion_of(info.name), ())
            self._by_owner[info.name] = by_owner(waiting, info.parallelism, self._query.max_parallelism)
        entries = self._by_owner[info.name].get(partition)
        return to_run(entries, self._query.key_groups(info, partition), with_lost=self._replays) if entries else ()

    def _added(self, info: OperatorInfo, receipt: Receipt, closed_ms: int | None) -> Iterable[RowsSetAside]:
        """Yield the waiting entries that a stalled partition adds."""
        key_groups, until_ms = self._query.key_groups(info, receipt.partition), max(self._watermark_ms, closed_ms or 0)
        at = self._time
        entry = RowsSetAside(
            checkpoint_id=self._checkpoint_id,
            first_key_group=key_groups.first,
            last_key_group=key_groups.last,
            rows=0,
            size_bytes=0,
            timestamp_ms=None if at is None else at.timestamp_ms,
            watermark_ms=None if at is None else at.watermark_ms,
            previous_watermark_ms=None if at is None else at.previous_watermark_ms,
            closed_ms=closed_ms,
        )
        rows, size = receipt.rows_set_aside, sum(ref.size_bytes for ref in receipt.set_aside)
        is_loss = self._query.settings.failover == BOUNDED_LOSS
        if rows:
            yield replace(entry, rows=rows, size_bytes=size, is_lost=is_loss)
        if (is_loss or not rows) and self._query.operators[info.name].uses_time:
            is_idle = self._query.is_idle(info, receipt.partition, until_ms)
            if self._entries(info, receipt.partition) or not is_idle:
                yield entry

    def _check(self, name: str) -> None:
        settings, known = self._query.settings, self._query.known[name]
        lost, run = self._lost(name), sum(receipt.rows for receipt in self._receipts[name])
        if not known.losses.allows(self._now_s, run, lost):
            raise BatchMustWaitError(
                f"{lost} rows of operator {self._infos[name].label} would be lost, and with those of the last minute "
                f"more than max_lost_fraction={settings.max_lost_fraction:g} of its rows"
            )
        waiting = chain.from_iterable(self._after.values())
        if sum(entry.size_bytes for entry in waiting if not entry.is_lost) > settings.max_deferred_bytes:
            raise BatchMustWaitError(
                f"deferred rows would take more than max_deferred_bytes={settings.max_deferred_bytes}"
            )
        if len(self._after[name]) > SET_ASIDE_MAX:
            raise BatchMustWaitError(
                f"rows of operator {self._infos[name].label} would wait in more than {SET_ASIDE_MAX} parts"
            )

    def _lost(self, name: str) -> int:
        if self._query.settings.failover != BOUNDED_LOSS:
            return 0
        return sum(receipt.rows_set_aside for receipt in self._receipts[name])
