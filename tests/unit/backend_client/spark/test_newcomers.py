"""The treatment of executors that joined later, without standbys; Spark's part is played."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from backend_client.spark.batch import Receipt
from backend_client.spark.places.newcomers import Newcomers
from backend_client.spark.places.seats import Executor, Seats, Takeover
from dstl_service.wire import OperatorInfo
from tests.waiting import wait_until

INFOS = [OperatorInfo("first", 2, "{}", {}), OperatorInfo("second", 2, "{}", {}), OperatorInfo("third", 3, "{}", {})]
TAKEOVER = Takeover(Seats(("a", "a"), (None, None)), Seats(("a", "b"), (None, None)))


class Hosts:
    """Hosts that have cold executors and something to take over."""

    def __init__(self, cold: list[Executor], takeovers: dict[int, Takeover]) -> None:
        self.cold = cold
        self.takeovers = takeovers
        self.taken: list[int] = []
        self.places: Mapping[int, Mapping[int, str]] = {}
        self.fails = False

    def look(self) -> None:
        """Look."""

    def takeover(self, parallelism: int) -> Takeover | None:
        """Return what is to be taken over."""
        return self.takeovers.get(parallelism)

    def take_over(self, parallelism: int, takeover: Takeover) -> None:
        """Note the takeover."""
        assert takeover == self.takeovers.pop(parallelism)
        self.taken.append(parallelism)

    def frame_at(self, _: Collection[str], executors: Collection[Executor]) -> Any:
        """Return a frame whose job does nothing."""
        assert [*executors] == self.cold
        if self.fails:
            raise RuntimeError("the job has failed")
        return SimpleNamespace(mapInArrow=lambda *_: SimpleNamespace(collect=list))

    def warmed(self, executors: Collection[Executor]) -> None:
        """Note that executors are warm."""
        self.cold = [executor for executor in self.cold if executor not in executors]

    def ran(self, places: Mapping[int, Mapping[int, str]]) -> None:
        """Note where tasks have run."""
        self.places = places


class Preparation:
    """Notes which tables were prepared."""

    def __init__(self, *, fails: bool = False) -> None:
        self.done: list[str] = []
        self.fails = fails

    def __call__(self, operator: str, takeover: Takeover) -> Iterator[object]:
        if self.fails:
            raise RuntimeError("the job has failed")
        assert takeover.partitions == [1]
        self.done.append(operator)
        yield None


def newcomers(hosts: Hosts, prepare: Preparation) -> Newcomers:
    """Return those of a query, after a look and the work that it began."""
    found: Any = hosts
    made = Newcomers(found, prepare)
    made.look(INFOS)
    wait_until(lambda: not made.is_working, what="the end of the work")
    return made


def test_tables_are_prepared_twice_before_they_are_taken_over() -> None:
    """The tables of all operators with that number of partitions are prepared, and once more for what came since."""
    hosts, prepare = Hosts([], {2: TAKEOVER}), Preparation()

    made = newcomers(hosts, prepare)

    assert prepare.done == ["first", "second"] * 2
    assert hosts.taken == [2]
    made.look(INFOS)
    assert not made.is_working, "there is nothing more to do"


def test_failed_preparation_does_not_keep_partitions_back() -> None:
    """The batch that finds no table restores it, so a host that cannot prepare gets its share nevertheless."""
    hosts = Hosts([], {2: TAKEOVER})
    newcomers(hosts, Preparation(fails=True))
    assert hosts.taken == [2]


def test_cold_executors_are_warmed_and_tried_again() -> None:
    """An executor counts as warm when its first job has succeeded; else the next batch repeats the job."""
    hosts = Hosts([Executor("7", "b", 2)], {})
    hosts.fails = True
    made = newcomers(hosts, Preparation())
    assert hosts.cold
    hosts.fails = False
    made.look(INFOS)
    wait_until(lambda: not hosts.cold, what="a warm executor")


def test_closed_query_takes_nothing_over() -> None:
    """A query that has ended begins no job."""
    hosts, prepare = Hosts([], {}), Preparation()
    made = newcomers(hosts, prepare)
    made.close()
    hosts.takeovers[2] = TAKEOVER

    made.look(INFOS)

    assert not made.is_working
    assert (prepare.done, hosts.taken) == ([], [])


def test_places_of_tasks_are_taken_from_receipts() -> None:
    """Receipts say where tasks ran; those of operators with the same number of partitions count together."""
    hosts = Hosts([], {})
    receipt = Receipt("first", 0, 0, 1, 1, 1, [])
    receipts = [
        replace(receipt, host="a"),
        replace(receipt, operator="second", partition=1, host="b"),
        replace(receipt, operator="third", partition=2, host=None),
    ]

    newcomers(hosts, Preparation()).ran(INFOS, receipts)

    assert hosts.places == {2: {0: "a", 1: "b"}, 3: {}}


def test_queries_without_places_do_nothing() -> None:
    """Where partitions are not pinned, or with standbys, there is nothing to do."""
    prepare = Preparation()
    made = Newcomers(None, prepare)
    made.look(INFOS)
    made.ran(INFOS, [])
    assert not made.is_working
