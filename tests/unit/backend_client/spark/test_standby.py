"""The driver's part of standbys, apart from Spark's part in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from backend_client.progress import BatchProgress
from backend_client.settings import BackendSettings
from backend_client.spark.places.seats import Executor, Seats
from backend_client.spark.standby.standby import READY_LAG_MAX, SILENT_BATCHES_MAX, Standby
from backend_client.standby.orders import StandbyReport, id_of
from dstl_service.wire import CheckpointRef, OperatorInfo
from tests.waiting import wait_until

INFOS = [OperatorInfo("op", 4, "{}", {})]
SEATS = Seats(("a", "a", "b", "b"), ("b", "c", "a", "c"))
PROGRESS = BatchProgress("job", 1, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 1)


class Hosts:
    """Hosts with fixed places, which note whom a query calls ready, and which ones it tells its plan apart."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.told: list[list[str]] = []
        self.executor_ids = frozenset("123")
        self.cold: list[Executor] = []
        self.fails = False

    def look(self, ready: Collection[str]) -> None:
        """Note the ready hosts."""
        self.ready = set(ready)

    def seats(self, parallelism: int) -> Seats:
        """Return the places."""
        assert parallelism == len(SEATS.runners)
        return SEATS

    def warmed(self, executors: Collection[Executor]) -> None:
        """Forget cold executors."""
        self.cold = [executor for executor in self.cold if executor not in executors]

    def frame_at(self, hosts: list[str], executors: Collection[Executor]) -> Any:
        """Note the places of a job that tells them the plan, and return a frame of no answers."""
        if self.fails:
            raise RuntimeError("the job has failed")
        self.told.append([*hosts, *(f"{one.host}/{one.id}" for one in executors)])
        return SimpleNamespace(mapInArrow=lambda *_: SimpleNamespace(collect=list))


def standby(hosts: Hosts, base_id: int | None = 7) -> Standby:
    """Return the standbys of a query."""
    base = None if base_id is None else CheckpointRef(base_id, 0, "u")
    session: Any = SimpleNamespace(base=base, job_uid="uid", epoch=1, max_parallelism=128)
    settings = BackendSettings("file:///s", "job", standby_replicas=1)
    found: Any = hosts
    return Standby(session, settings, found)


def hear(of: Standby, *reports: StandbyReport) -> BatchProgress:
    """Have the tasks of a batch report."""
    receipts: list[Any] = [SimpleNamespace(standby=asdict(report)) for report in reports]
    receipts.append(SimpleNamespace(standby=None))
    return of.heard(receipts, PROGRESS)


def test_plan_names_the_keepers_of_each_operator() -> None:
    """Tasks get the keeper of each partition; without standbys there is no plan, and no figure."""
    plan = standby(Hosts()).plan(INFOS)

    assert plan is not None
    assert (plan.hosts, dict(plan.keepers)) == (("a", "b", "c"), {"op": (1, 2, 0, 2)})

    session: Any = None
    without = Standby(session, BackendSettings("file:///s", "job"), None)
    assert without.plan(INFOS) is None
    assert without.heard([], PROGRESS) == PROGRESS


def test_host_is_ready_with_all_copies_of_the_plan() -> None:
    """Only a host whose report is about the tables that it has to keep now, complete and recent, is ready."""
    hosts = Hosts()
    query = standby(hosts)
    plan = query.plan(INFOS)
    assert plan is not None
    good = StandbyReport("c", 2, 0, READY_LAG_MAX, 100, id_of(plan.of_host("c")))
    for report, is_ready in (
        (good, True),
        (replace(good, lag=READY_LAG_MAX + 1), False),
        (replace(good, missing=1), False),
        (replace(good, tables_id=id_of(plan.of_host("a"))), False),
        (good, True),
    ):
        hear(query, report)
        query.plan(INFOS)
        assert (hosts.ready == {"c"}) is is_ready


def test_figures_are_those_of_all_hosts() -> None:
    """Copies and bytes of hosts add up, the lag is the largest one; a host that keeps nothing any more drops out."""
    query = standby(Hosts())
    query.plan(INFOS)
    hear(query, StandbyReport("a", 1, 0, 3, 10, 1), StandbyReport("gone", 9, 9, 9, 9, 9))
    query.plan(INFOS)
    found = hear(query, StandbyReport("b", 2, 1, 1, 20, 1))

    assert (found.standby_tables, found.standby_missing, found.standby_lag, found.standby_bytes) == (3, 1, 3, 30)


def test_hosts_without_tasks_are_told_apart() -> None:
    """A host that runs no partition is told by a job of its own, and one that was silent for some batches, too."""
    hosts = Hosts()
    query = standby(hosts)
    query.plan(INFOS)
    wait_until(lambda: hosts.told == [["c"]])

    def tells_again(told: int) -> bool:
        hear(query, StandbyReport("a", 1, 0, 0, 10, 1))
        query.plan(INFOS)  # tells nobody while the job before has not ended
        return len(hosts.told) > told

    for _ in range(SILENT_BATCHES_MAX + 1):
        told = len(hosts.told)
        wait_until(lambda: tells_again(told))  # noqa: B023
    assert hosts.told[-1] == ["b", "c"]


def test_cold_executors_are_told_until_it_succeeds() -> None:
    """An executor that has come is told by a job of its own; if that fails, it stays cold, and the next batch does."""
    hosts = Hosts()
    query = standby(hosts)
    cold = hosts.cold = [Executor("7", "b", 1), Executor("8", "c", 1)]
    hosts.fails = True
    query.plan(INFOS)
    wait_until(lambda: not query.is_telling)
    assert hosts.cold == cold

    hosts.fails = False
    query.plan(INFOS)
    wait_until(lambda: not hosts.cold)
    assert hosts.told == [["b/7", "c/8"]], "c, which runs no partition, is not told twice"


def test_output_is_kept_twice_where_that_is_possible() -> None:
    """A batch's output has two replicas with standbys, one without them or with a single executor."""
    hosts = Hosts()
    query = standby(hosts)
    assert query.output_replicas == 2
    hosts.executor_ids = frozenset("1")
    assert query.output_replicas == 1

    session: Any = None
    assert Standby(session, BackendSettings("file:///s", "job"), None).output_replicas == 1


def test_nobody_is_told_before_the_first_checkpoint() -> None:
    """Without a checkpoint there is nothing to copy."""
    hosts = Hosts()
    query = standby(hosts, base_id=None)
    query.plan(INFOS)

    assert hosts.told == []


def test_copies_of_a_renamed_operator_are_those_of_its_table() -> None:
    """Hosts that have copies keep them: an operator's new name is in no folder and in no order."""
    renamed = [replace(INFOS[0], called="new", renamed_from="op")]
    before, after = standby(Hosts()).plan(INFOS), standby(Hosts()).plan(renamed)

    assert before is not None
    assert before == after
    assert {table.operator for host in before.hosts for table in before.of_host(host)} == {"op"}
