"""The instructions for a batch's tasks while tables are being restored, and the rows that wait after it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.types import StructType

from backend_client.batch_time import BatchTime, TimeMode
from backend_client.failover.patience import Patience
from backend_client.settings import BackendSettings
from backend_client.spark.batch import Receipt
from backend_client.spark.failover.failover import BatchFailover, BatchMustWaitError, Failover
from backend_client.spark.failover.restoring import Restoring
from backend_client.spark.query import Operator
from dstl_service.wire import REMOVED, ChangeSetRef, CheckpointInfo, CheckpointRef, OperatorInfo, RowsSetAside
from storage.errors import UnavailableError
from storage.key_groups import KeyGroupRange
from tests.waiting import wait_until

INFO = OperatorInfo("op", 2, "{}", {}, kind="rows")
TIME = BatchTime(5000, 40, 30)
WAITS, SOON = None, Patience(1.0, sets_aside=True)
AT_ONCE = Patience(0.0, sets_aside=True)
IF_WITHOUT_ROWS = Patience(1.0, sets_aside=False)


class Restores:
    """Restores that end when they are told to."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[tuple[str, int, list[int]]] = []

    def __call__(self, operator: str, parallelism: int, partitions: Sequence[int]) -> Iterable[Sequence[int]]:
        """Restore partitions one by one."""
        self.begun.append((operator, parallelism, list(partitions)))
        for partition in partitions:
            self.may_end.wait()
            yield [partition]


class Query:
    """A query's failover, and batches of it without Spark."""

    def __init__(
        self, time_mode: TimeMode = TimeMode.NONE, parallelism: int = 2, others: Sequence[str] = (), **settings: Any
    ) -> None:
        operator: Any = None
        schema = StructType().add("k", "string")
        first = Operator("op", operator, ("k",), schema, schema, {}, None, (), time_mode=time_mode)
        made = [first, *(replace(first, name=name) for name in others)]
        self.restores = Restores()
        given = {"failover": "deferred", **settings}
        self.failover = Failover(BackendSettings("file:///tmp/s", "job", **given), made, 10, Restoring(self.restores))
        self.latest: CheckpointInfo | None = None
        self.info = replace(INFO, parallelism=parallelism)
        self.others = [replace(self.info, name=name) for name in others]

    def begin(self, *, must_wait: bool = False) -> BatchFailover:
        """Begin the next batch."""
        number = 0 if self.latest is None else self.latest.ref.id + 1
        return self.failover.begin(number, self.latest, [self.info, *self.others], TIME, must_wait=must_wait)

    def told(self, batch: BatchFailover) -> list[Patience | None]:
        """Return each partition's patience."""
        tasks = batch.for_tasks(self.info, can_stall=True)
        return [tasks.patience.get(partition) for partition in range(self.info.parallelism)]

    def batch(self, *receipts: Receipt, closed_ms: int | None = None, must_wait: bool = False) -> BatchFailover:
        """Run a batch with these receipts; a partition without one has run its rows."""
        batch = self.begin(must_wait=must_wait)
        given = {(receipt.operator, receipt.partition): receipt for receipt in receipts}
        for info in (self.info, *self.others):
            batch.took(info, [given.get((info.name, number)) or ran(number) for number in range(info.parallelism)])
        batch.close(closed_ms)
        self.complete(batch)
        return batch

    def complete(self, batch: BatchFailover) -> None:
        """Complete the batch's checkpoint."""
        number = 0 if self.latest is None else self.latest.ref.id + 1
        operators = [self.info, *self.others, *batch.companions]
        self.latest = CheckpointInfo(CheckpointRef(number, 0, "u"), None, 1, 0, "", "", operators, 0, 0)
        batch.completed()

    @property
    def waiting(self) -> list[RowsSetAside]:
        """The entries that the newest checkpoint lists."""
        assert self.latest is not None
        return [entry for info in self.latest.operators for entry in info.set_aside]


def ran(partition: int, rows: int = 100, next_due_ms: int | None = None) -> Receipt:
    """Return the receipt of a task that has run."""
    return Receipt("op", partition, partition, rows, rows, rows, [], next_due_ms=next_due_ms)


def stalled(partition: int, rows: int = 0) -> Receipt:
    """Return the receipt of a task whose table was not there."""
    refs = [ChangeSetRef("op.set-aside", 0, 1, partition, partition, 0, 70, "s")] if rows else []
    receipt = Receipt("op", partition, partition, 0, 0, 0, [])
    return replace(receipt, is_stalled=True, rows_set_aside=rows, set_aside=refs)


def test_first_batch_waits_for_all() -> None:
    """A query's first batch, and one with another parallelism, run whatever waits: no task stalls."""
    query = Query(TimeMode.EVENT)
    assert query.told(query.begin()) == [WAITS, WAITS]
    query.batch()
    assert query.told(query.begin()) == [SOON, SOON]
    query.info = replace(INFO, parallelism=3)
    assert query.told(query.begin()) == [WAITS, WAITS, WAITS]


def test_stalled_partition_does_not_try_while_it_is_restored() -> None:
    """Its rows are set aside at once, with a list in the manifest, until its table is there; then it runs them."""
    query = Query()
    query.batch()
    assert not [info for info in query.latest.operators if not info.has_table] if query.latest else False
    query.batch(stalled(1, rows=5))
    batch = query.begin()

    assert query.told(batch) == [SOON, AT_ONCE]
    assert query.waiting == [RowsSetAside(1, 5, 9, 5, 70, 5000, 40, 30)]
    assert batch.for_tasks(query.info, can_stall=True).waiting == {1: tuple(query.waiting)}
    query.restores.may_end.set()
    wait_until(lambda: not query.failover.restoring.is_running("op", 2, 1), what="the end of the restore")
    assert query.told(query.begin()) == [SOON, SOON]
    assert query.restores.begun == [("op", 2, [1])]
    assert query.batch().rows_waiting == 0
    assert query.waiting == []
    assert query.latest is not None
    assert [info.name for info in query.latest.operators] == ["op", "op.set-aside"], "it says that nothing waits"


def test_partitions_do_not_look_at_what_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's own work grows with what waits, not with that times the number of partitions."""
    partitions, batches, looks = 200, 5, 0
    query = Query(TimeMode.EVENT, parallelism=partitions)
    query.failover.max_parallelism = partitions
    query.batch()
    for _ in range(batches):
        query.batch(*(stalled(number, rows=5) for number in range(0, partitions, 2)))
    assert len(query.waiting) == batches * partitions / 2

    def counted(entry: RowsSetAside) -> KeyGroupRange:
        nonlocal looks
        looks += 1
        return KeyGroupRange(entry.first_key_group, entry.last_key_group)

    monkeypatch.setattr(RowsSetAside, "key_groups", property(counted))
    query.told(query.begin())
    query.batch(*(stalled(number, rows=5) for number in range(0, partitions, 2)))
    assert len(query.waiting) == (batches + 1) * partitions / 2
    assert looks < 10 * len(query.waiting)


def test_restore_that_ended_within_a_batch_is_of_use_to_the_next() -> None:
    """Where each batch begins while tables are being restored, a partition does not stay stalled for ever."""
    query = Query()
    query.batch()
    query.batch(stalled(1, rows=10))
    batch = query.begin()
    assert query.told(batch) == [SOON, AT_ONCE]
    query.restores.may_end.set()
    query.failover.restoring.wait()
    query.restores.may_end.clear()
    batch.took(query.info, [ran(0), stalled(1, rows=10)])
    batch.close(None)
    query.complete(batch)

    assert query.told(query.begin()) == [SOON, SOON]
    query.batch(stalled(1, rows=10))
    assert query.told(query.begin()) == [SOON, AT_ONCE]
    query.restores.may_end.set()


def test_tables_of_another_parallelism_are_not_waited_for() -> None:
    """The batch that changes the parallelism waits for no restore of a table that nothing will open any more."""
    query = Query()
    query.batch()
    query.batch(stalled(0, rows=10), stalled(1, rows=10))
    wait_until(lambda: query.restores.begun == [("op", 2, [0, 1])], what="the restore beside the batches")
    query.info = replace(INFO, parallelism=3)
    told = list[list[Patience | None]]()
    beginning = threading.Thread(target=lambda: told.append(query.told(query.begin())), daemon=True)
    beginning.start()
    beginning.join(10)

    assert told == [[WAITS, WAITS, WAITS]]
    query.batch()
    query.batch(stalled(2, rows=10))
    query.restores.may_end.set()
    query.failover.restoring.wait()
    assert query.restores.begun == [("op", 2, [0, 1]), ("op", 3, [2])]
    assert query.waiting[0].rows == 10


def test_time_waits_with_the_rows() -> None:
    """I14: a batch without rows for a stalled partition is listed if something may be due in it, else it is not."""
    query = Query(TimeMode.EVENT)
    query.batch(ran(0, next_due_ms=None), ran(1, next_due_ms=60))
    query.batch(stalled(0), stalled(1), closed_ms=59)
    assert query.waiting == []
    query.batch(stalled(0), stalled(1), closed_ms=60)
    assert query.waiting == [RowsSetAside(2, 5, 9, 0, 0, 5000, 40, 30, 60)]
    query.batch(stalled(0), stalled(1), closed_ms=61)
    assert [(entry.checkpoint_id, entry.first_key_group, entry.closed_ms) for entry in query.waiting] == [
        (2, 5, 60),
        (3, 5, 61),
    ]
    query.restores.may_end.set()


def test_exact_batch_skips_idle_partitions_only() -> None:
    """In exact mode a partition goes without its table only if nothing can be due, and tells what it knew is due."""
    query = Query(TimeMode.EVENT, failover="exact")
    query.batch(ran(0, next_due_ms=41), ran(1, next_due_ms=40))
    batch = query.begin()

    assert query.told(batch) == [IF_WITHOUT_ROWS, WAITS]
    assert batch.took(query.info, [stalled(0), ran(1)])[0].next_due_ms == 41
    assert batch.for_second_pass(query.info, 40).patience == {0: Patience(0.0, sets_aside=False)}
    assert batch.for_second_pass(query.info, 41).patience == {}, "it has something due: it waits for its table"
    batch.took_again(query.info, [ran(0), ran(1)])
    batch.close(41)
    query.complete(batch)
    assert query.waiting == []
    assert query.told(query.begin())[0] == Patience(0.0, sets_aside=False), "it is restored beside the batches"
    query.restores.may_end.set()


def test_unknown_dues_are_waited_for() -> None:
    """Timers of processing time are not known to the driver, so a partition without rows waits for its table."""
    query = Query(TimeMode.PROCESSING, failover="exact")
    query.batch()
    assert query.told(query.begin()) == [WAITS, WAITS]


def test_too_many_deferred_bytes_wait() -> None:
    """Beyond the bound the batch is executed again and waits for its tables, which runs everything."""
    query = Query(max_deferred_bytes=139)
    query.batch()
    query.batch(stalled(1, rows=5))
    with pytest.raises(BatchMustWaitError, match="max_deferred_bytes=139"):
        query.batch(stalled(1, rows=5))
    query.restores.may_end.set()
    assert query.told(query.begin(must_wait=True)) == [IF_WITHOUT_ROWS, WAITS]
    query.batch(must_wait=True)
    assert query.waiting == []


def test_deferred_bytes_of_all_operators_count_together() -> None:
    """Rows of a later operator that still wait count, too, when only an earlier one adds to them."""
    query = Query(others=["other"], max_deferred_bytes=139)
    query.batch()
    query.batch(replace(stalled(1, rows=5), operator="other"))
    with pytest.raises(BatchMustWaitError, match="max_deferred_bytes=139"):
        query.batch(stalled(1, rows=5), replace(stalled(1), operator="other"))
    query.restores.may_end.set()


def test_losses_stay_within_their_bound() -> None:
    """I17: rows are lost, and listed, while they are few; a batch that would lose more waits instead."""
    query = Query(TimeMode.EVENT, failover="bounded-loss", max_lost_fraction=0.01)
    query.batch(ran(0, 1000), ran(1, 990, next_due_ms=0))
    batch = query.batch(stalled(1, rows=10), ran(0, 0), closed_ms=60)

    assert (batch.rows_lost, batch.rows_waiting) == (10, 0)
    entry = RowsSetAside(1, 5, 9, 10, 70, 5000, 40, 30, 60, is_lost=True)
    assert query.waiting == [entry, replace(entry, rows=0, size_bytes=0, is_lost=False)], "its time has not passed"
    query.batch(stalled(1, rows=10), ran(0, 0), closed_ms=60)
    with pytest.raises(BatchMustWaitError, match=r"max_lost_fraction=0\.01"):
        query.batch(stalled(1, rows=11), ran(0, 1000))
    query.restores.may_end.set()
    query.batch(must_wait=True)
    assert [(entry.checkpoint_id, entry.rows, entry.is_lost) for entry in query.waiting] == [
        (1, 10, True),
        (2, 10, True),
    ]


def test_bound_holds_over_a_restart() -> None:
    """I17: what an earlier run has lost counts against the bound of the next one, once."""
    earlier, query = (Query(failover="bounded-loss", max_lost_fraction=0.01) for _ in range(2))
    earlier.batch(ran(0, 1000), ran(1, 1000))
    earlier.batch(stalled(1, rows=10), ran(0, 0))
    query.latest = earlier.latest
    query.begin()  # the first batch fails
    query.batch(ran(0, 600), ran(1, 400))
    query.batch(stalled(1, rows=1), ran(0, 99))
    with pytest.raises(BatchMustWaitError, match="1 rows of operator op would be lost"):
        query.batch(stalled(1, rows=1), ran(0, 0))
    for restores in (earlier.restores, query.restores):
        restores.may_end.set()


def test_failed_restore_is_tried_again() -> None:
    """A restore that fails is forgotten: the next batch tries, and has the table restored again."""

    def fail(*_: Any) -> Iterable[Sequence[int]]:
        raise RuntimeError("no executor")

    restoring = Restoring(fail)
    for _ in range(2):
        restoring.request("op", 2, [1])
        restoring.wait()
        assert not restoring.is_running("op", 2, 1)


def test_batch_that_waits_ends_with_its_query() -> None:
    """Stopping a query does not wait for its tables, and no batch begins without them."""
    query = Query()
    query.batch()
    query.batch(stalled(1, rows=5))
    begun, errors = list[BatchFailover](), list[str]()

    def begin() -> None:
        try:
            begun.append(query.begin(must_wait=True))
        except UnavailableError as error:
            errors.append(str(error))

    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(0.2)
    assert beginning.is_alive()
    query.failover.close()
    beginning.join(10)

    assert (begun, errors) == (
        [],
        ["the query ends while tables are being restored; rows that wait for them stay"],
    )
    query.restores.may_end.set()


def test_rows_of_a_renamed_operator_run() -> None:
    """The first batch runs the rows that wait for an operator's table under its new name, and lists them no more."""
    before = Query()
    before.batch()
    before.batch(stalled(0, rows=7))
    after = Query()
    after.latest, after.info = before.latest, replace(INFO, called="new", renamed_from="op")
    told = after.begin().for_tasks(after.info, can_stall=True)

    assert {partition: sum(entry.rows for entry in entries) for partition, entries in told.waiting.items()} == {0: 7}
    assert told.companion == "op.set-aside"
    batch = after.batch()
    assert ([info.name for info in batch.companions], after.waiting) == (["op.set-aside"], [])


def test_rows_of_a_removed_operator_count_for_nobody() -> None:
    """Lost rows that were given up with their operator are neither run nor listed, nor bound what others may lose."""
    lost = [RowsSetAside(1, 0, 4, 50, 70, is_lost=True)]
    gone = [OperatorInfo(name, 2, "", {}, kind=REMOVED, set_aside=lost) for name in ("gone", "gone.set-aside")]
    query = Query(failover="bounded-loss", max_lost_fraction=0.01)
    query.latest = CheckpointInfo(CheckpointRef(3, 0, "u"), None, 1, 0, "", "", [INFO, *gone], 0, 0)
    assert query.begin().for_tasks(query.info, can_stall=True).waiting == {}
    batch = query.batch()

    assert batch.companions == []
    assert (batch.rows_waiting, batch.rows_lost) == (0, 0)
